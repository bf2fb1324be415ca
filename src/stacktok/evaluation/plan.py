"""The plan of a study: models x methods x budgets x tasks, read from YAML and checked before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, field_validator, model_validator

from stacktok.core.budget import Budget, budget_share

FULL = "Vanilla"
"""Name of the unpruned model in tables, as in the paper."""

SCENES = "scenes/"
"""Prefix of the embedded model's own tasks; what follows is a question family."""


def _checked_budget(value: Any) -> Any:
    if isinstance(value, (int, float, str)):
        try:
            budget_share(value)
        except TypeError as error:
            # pydantic gathers ValueErrors alone.
            raise ValueError(str(error)) from None
        return value
    raise ValueError(f"{value!r} is no budget; give a count such as 64 or a share such as '20%'")


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
    budgets
        In place of the plan's.
    """

    name: str = Field(min_length=1)
    pretrained: str = Field(min_length=1)
    budgets: tuple[PlanBudget, ...] | None = Field(default=None, min_length=1)


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
    budgets, models
        Where only these are to be run.
    """

    name: str = Field(min_length=1)
    method: str = Field(min_length=1)
    settings: dict[str, Any] = {}
    budgets: tuple[PlanBudget, ...] | None = Field(default=None, min_length=1)
    models: tuple[str, ...] | None = Field(default=None, min_length=1)

    @field_validator("name")
    @classmethod
    def _not_the_full_model(cls, name: str) -> str:
        if name == FULL:
            raise ValueError(f"{FULL!r} is the unpruned model, which `full: true` adds; choose another name")
        return name


class TaskPart(_Part):
    """A benchmark of the plan.

    Attributes
    ----------
    name
        In tables.
    task
        Name in lmms-eval, or ``scenes/FAMILY``.
    metrics
        Metrics of that task whose sum is the benchmark's score.
    scale
        Factor that brings the score to the paper's unit (100 for a share).
    group
        Field of a document that is the same for items that are not independent, such as questions on one image.
    """

    name: str = Field(min_length=1)
    task: str = Field(min_length=1)
    metrics: tuple[str, ...] = Field(min_length=1)
    scale: float = Field(default=1.0, gt=0)
    group: str | None = None


class Plan(_Part):
    """Which cells to run, and under which settings.

    Attributes
    ----------
    name
        Folder of the results.
    engine
        "lmms-eval", or "loop" for this package's own loop, which knows the scenes alone.
    models, methods, budgets, tasks
        What is crossed. A method's budgets go before a model's, a model's before the plan's.
    averaged
        Benchmarks over which Avg. is taken; all if not given.
    full
        Run the unpruned model too, to which retention refers.
    limit
        Items per task; all if not given.
    scenes
        Scenes of the test split that ``scenes/`` tasks ask about.
    batch_size, dtype
        How a model is run.
    """

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    engine: Literal["lmms-eval", "loop"] = "lmms-eval"
    models: tuple[ModelPart, ...] = Field(min_length=1)
    methods: tuple[MethodPart, ...] = ()
    budgets: tuple[PlanBudget, ...] = ()
    tasks: tuple[TaskPart, ...] = Field(min_length=1)
    averaged: tuple[str, ...] | None = Field(default=None, min_length=1)
    full: bool = True
    limit: int | None = Field(default=None, ge=1)
    scenes: int = Field(default=200, ge=1)
    batch_size: int = Field(default=1, ge=1)
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        for kind, names in (
            ("models", [model.name for model in self.models]),
            ("methods", [method.name for method in self.methods]),
            ("tasks", [task.name for task in self.tasks]),
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
            if name not in columns:
                raise ValueError(f"averaged names the task {name!r}; the tasks are {', '.join(columns)}")
        if not self.full and not self.methods:
            raise ValueError("methods is empty and full is false, so there is nothing to run; give a method")
        for task in self.tasks:
            if self.engine == "loop" and not task.task.startswith(SCENES):
                raise ValueError(
                    f"task {task.task!r} needs engine: lmms-eval; the engine loop knows {SCENES}FAMILY tasks alone"
                )
            _check_scenes(task)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """Benchmarks over which Avg. is taken."""
        return self.averaged or tuple(task.name for task in self.tasks)

    def budgets_of(self, model: ModelPart, method: MethodPart) -> Sequence[Budget]:
        """The budgets at which a method is run on a model."""
        if method.models is not None and model.name not in method.models:
            return ()
        return method.budgets or model.budgets or self.budgets


def _check_scenes(task: TaskPart) -> None:
    if not task.task.startswith(SCENES):
        return
    from stacktok.scenes import FAMILIES

    family = task.task.removeprefix(SCENES)
    if family not in FAMILIES:
        raise ValueError(f"task {task.task!r} names no question family; the families are {', '.join(FAMILIES)}")
    if task.metrics != ("exact_match",):
        raise ValueError(f"task {task.task!r} has the metric exact_match alone; metrics is {list(task.metrics)}")


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
        raise ValueError(f"plan {name} holds {type(values).__name__}, not fields; see docs/reproduce.md for the format")
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
