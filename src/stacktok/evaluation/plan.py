"""The plan of a study: models x methods x budgets x positions x conditions x tasks, read from YAML and checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from stacktok.core.budget import Budget, check_budget

FULL = "Vanilla"
"""Name of the unpruned model in tables, as in the paper."""

SCENES = "scenes"
"""The embedded models' own task: all questions about a scene, or with ``/FAMILY`` those of one family."""


def is_scenes(task: str) -> bool:
    """Whether a task asks about scenes."""
    return task == SCENES or task.startswith(f"{SCENES}/")


def _checked_budget(value: Any) -> Any:
    if isinstance(value, (int, float, str)):
        try:
            check_budget(value)
        except TypeError as error:
            # pydantic gathers ValueErrors alone.
            raise ValueError(str(error)) from None
        return value
    raise ValueError(f"{value!r} is no budget; give a count such as 64 or a share such as '20%'")


Log = Literal["items", "scores"]
Positions = Literal["compact", "kept"]
PlanBudget = Annotated[int | float | str, BeforeValidator(_checked_budget)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelPart(_Part):
    """A model of the plan.

    Attributes
    ----------
    name
        In tables.
    pretrained
        Folder or hub name; ``embedded/llava`` is the model that ships with the package.
    style
        Style of the scenes that it is asked about.
    budgets, positions
        In place of the plan's.
    """

    name: str = Field(min_length=1)
    pretrained: str = Field(min_length=1)
    style: Literal["standard", "detail"] = "standard"
    budgets: tuple[PlanBudget, ...] | None = Field(default=None, min_length=1)
    positions: tuple[Positions, ...] | None = Field(default=None, min_length=1)


class MethodPart(_Part):
    """A method of the plan, under one set of parameters.

    Attributes
    ----------
    name
        In tables.
    method
        Name in the registry of methods.
    settings
        The method's parameters where they differ from its defaults.
    budgets, positions, models
        Where only these are to be run.
    tags
        Names under which a table can ask for several methods at once.
    log
        In place of the plan's.
    """

    name: str = Field(min_length=1)
    method: str = Field(min_length=1)
    settings: dict[str, Any] = {}
    budgets: tuple[PlanBudget, ...] | None = Field(default=None, min_length=1)
    positions: tuple[Positions, ...] | None = Field(default=None, min_length=1)
    models: tuple[str, ...] | None = Field(default=None, min_length=1)
    tags: tuple[str, ...] = ()
    log: Log | None = None

    @field_validator("name")
    @classmethod
    def _not_the_full_model(cls, name: str) -> str:
        if name == FULL:
            raise ValueError(f"{FULL!r} is the unpruned model, which `full: true` adds; choose another name")
        return name


class ConditionPart(_Part):
    """A disturbance of what a selector sees; the language model gets the true tokens and question.

    Attributes
    ----------
    name
        In tables.
    kind
        "token-noise": Gaussian noise on the tokens' features before and after the projector, its standard deviation
        in units of the spread of the crop's tokens about their mean.
        "query-noise": Gaussian noise on the query's embeddings, in units of their root mean square.
        "modality-gap": one constant vector added to all projected tokens, in units of their mean length.
        "random-question": as many random words of the vocabulary as the question has.
        "other-question": a question about another scene.
    strength
        Factor of the units above; without meaning for the two kinds of questions.
    seed
        Of the random numbers, which are drawn per scene or question, whatever else is run.
    """

    name: str = Field(min_length=1)
    kind: Literal["token-noise", "query-noise", "modality-gap", "random-question", "other-question"]
    strength: float = Field(default=1.0, gt=0)
    seed: int = Field(default=0, ge=0)


class TaskPart(_Part):
    """A benchmark of the plan.

    Attributes
    ----------
    name
        In tables.
    task
        Name in lmms-eval, ``scenes``, or ``scenes/FAMILY``.
    metrics
        Metrics of that task whose sum is the benchmark's score.
    scale
        Factor that brings the score to the paper's unit (100 for a share).
    group
        Field of a document that is the same for items that are not independent, such as questions on one image.
    by
        Field of a document whose values make a column each, in place of one column for the task.
    """

    name: str = Field(min_length=1)
    task: str = Field(min_length=1)
    metrics: tuple[str, ...] = Field(min_length=1)
    scale: float = Field(default=1.0, gt=0)
    group: str | None = None
    by: str | None = None


class Plan(_Part):
    """Which cells to run, and under which settings.

    Attributes
    ----------
    name
        Folder of the results.
    engine
        "lmms-eval", or "loop" for this package's own loop over the scenes, which encodes each picture once.
    models, methods, budgets, positions, tasks
        What is crossed. A method's budgets and positions go before a model's, a model's before the plan's; without
        positions a method follows its own default.
    conditions
        Run selectors under these too, besides the plain condition; for the engine loop.
    averaged
        Benchmarks over which Avg. is taken; all if not given.
    full
        Run the unpruned model too, to which retention refers.
    limit
        Items per task; all if not given.
    scenes, split
        How many scenes tasks on scenes ask about, and from which split.
    batch_size, dtype
        How a model is run.
    log
        What is stored per item: "items", everything that is known; "scores", score, wrong answer and tokens.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    engine: Literal["lmms-eval", "loop"] = "lmms-eval"
    models: tuple[ModelPart, ...] = Field(min_length=1)
    methods: tuple[MethodPart, ...] = ()
    budgets: tuple[PlanBudget, ...] = ()
    positions: tuple[Positions, ...] | None = Field(default=None, min_length=1)
    conditions: tuple[ConditionPart, ...] = ()
    tasks: tuple[TaskPart, ...] = Field(min_length=1)
    averaged: tuple[str, ...] | None = Field(default=None, min_length=1)
    full: bool = True
    limit: int | None = Field(default=None, ge=1)
    scenes: int = Field(default=200, ge=1)
    split: Literal["dev", "test"] = "test"
    batch_size: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    log: Log = "items"

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        for kind, names in (
            ("models", [model.name for model in self.models]),
            ("methods", [method.name for method in self.methods]),
            ("tasks", [task.name for task in self.tasks]),
            ("conditions", [condition.name for condition in self.conditions]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise ValueError(f"{kind} has the name {twice[0]!r} twice; give every entry its own")
        known = {model.name for model in self.models}
        for method in self.methods:
            for name in method.models or ():
                if name not in known:
                    raise ValueError(
                        f"method {method.name!r} names the model {name!r}; the models are {', '.join(sorted(known))}"
                    )
            if not (method.budgets or self.budgets or all(model.budgets for model in self.models)):
                raise ValueError(
                    f"method {method.name!r} has no budgets; give some to it, to its models or to the plan"
                )
        columns = [task.name for task in self.tasks]
        for name in self.averaged or ():
            if name not in columns and not any(task.by for task in self.tasks):
                raise ValueError(f"averaged names the task {name!r}; the tasks are {', '.join(columns)}")
        if not self.full and not self.methods:
            raise ValueError("methods is empty and full is false, so there is nothing to run; give a method")
        if self.engine != "loop" and (self.conditions or self.split != "test"):
            raise ValueError(
                "conditions and split: dev need engine: loop; lmms-eval asks about the test split as it is"
            )
        for task in self.tasks:
            if self.engine == "loop" and not is_scenes(task.task):
                raise ValueError(
                    f"task {task.task!r} needs engine: lmms-eval; the engine loop knows scenes and scenes/FAMILY alone"
                )
            _check_scenes(task)
        return self

    def runs_of(self, model: ModelPart, method: MethodPart) -> Iterator[tuple[Budget, Positions | None]]:
        """The budgets and position policies at which a method is run on a model."""
        if method.models is not None and model.name not in method.models:
            return
        for budget in method.budgets or model.budgets or self.budgets:
            for positions in method.positions or model.positions or self.positions or (None,):
                yield budget, positions


def _check_scenes(task: TaskPart) -> None:
    if not is_scenes(task.task):
        return
    from stacktok.scenes import FAMILIES

    family = task.task.removeprefix(SCENES).removeprefix("/")
    if family and family not in FAMILIES:
        raise ValueError(f"task {task.task!r} names no question family; the families are {', '.join(FAMILIES)}")
    if task.metrics != ("exact_match",):
        raise ValueError(f"task {task.task!r} has the metric exact_match alone; metrics is {list(task.metrics)}")
    if task.group not in (None, "scene_seed"):
        raise ValueError(f"group {task.group!r} of task {task.task!r} groups no questions; give 'scene_seed'")


def shipped_plans() -> dict[str, str]:
    """Names of the plans that ship with the package, each with its first comment line."""
    found = {}
    for entry in sorted(files("stacktok.evaluation").joinpath("plans").iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".yaml"):
            first = entry.read_text(encoding="utf-8").splitlines()[0]
            found[entry.name.removesuffix(".yaml")] = first.lstrip("# ")
    return found


def load_plan(name: str | Path, changes: Mapping[str, Any] | None = None) -> Plan:
    """Read a plan: a YAML file, or the name of a shipped one.

    Parameters
    ----------
    name
        Path or name.
    changes
        Top-level fields to set in place of the file's.
    """
    path = Path(name)
    if path.is_file():
        text = path.read_text(encoding="utf-8")
    elif str(name) in shipped_plans():
        text = files("stacktok.evaluation").joinpath(f"plans/{name}.yaml").read_text(encoding="utf-8")
    else:
        raise ValueError(
            f"plan {str(name)!r} is neither a file nor a shipped plan; shipped are {', '.join(shipped_plans())}"
        )
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        raise ValueError(f"plan {name}{where} is not YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(values, dict):
        raise ValueError(f"plan {name} holds {type(values).__name__}, not fields; see docs/evaluate.md for the format")
    return parse_plan({**values, **(changes or {})}, source=str(name))


def parse_plan(values: Mapping[str, Any], *, source: str = "given") -> Plan:
    """Check the fields of a plan; the error names every field that is wrong and how."""
    try:
        return Plan.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"plan {source}: {'; '.join(_say(entry) for entry in error.errors())}") from None


def _say(entry: Mapping[str, Any]) -> str:
    where = ".".join(str(step) for step in entry["loc"] if not str(step).startswith("function-"))
    if entry["type"] == "extra_forbidden":
        return f"{where} is not a field of a plan"
    if entry["type"] == "missing":
        return f"{where} is missing"
    message = entry["msg"].removeprefix("Value error, ")
    given = entry.get("input")
    shown = (
        f" (given {given!r})" if isinstance(given, (str, int, float, bool)) and entry["type"] != "value_error" else ""
    )
    return f"{where}: {message}{shown}" if where else message
