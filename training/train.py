"""Train an embedded model: ``python -m training.train --config training/configs/llava.yaml --out runs/llava``.

All stages in one go. A run that was killed goes on from its last checkpoint when started again with the same
arguments, and ends in the same weights, because every batch is a function of the step alone.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stacktok.embedded import path
from stacktok.scenes.questions import FAMILIES, questions
from stacktok.scenes.scene import Style, make_scene
from stacktok.scenes.splits import seed_for
from training.config import Stage, TrainConfig, load_config
from training.curves import draw_curves
from training.data import Batch, Scenes, TextPacker, View, batches, make_batch
from training.export import export
from training.losses import Heads, Objective
from training.model import build_model, scale_words, start_from
from training.muon import Muon


class Run:
    """A training run with everything that a checkpoint holds."""

    def __init__(self, config: TrainConfig, out: Path) -> None:
        torch.set_num_threads(config.threads)
        self.config, self.out = config, out
        out.mkdir(parents=True, exist_ok=True)
        sizes = config.model
        self.model = build_model(sizes, config.seed)
        if config.init_from is not None:
            folder = Path(config.init_from)
            start_from(self.model, folder if folder.is_dir() else path(config.init_from))
        self.heads = Heads(sizes.vision_hidden, sizes.text_hidden)
        self.objective = Objective(self.model, self.heads)
        named = [*self.model.named_parameters(), *self.heads.named_parameters()]
        matrices = [p for n, p in named if p.ndim == 2 and (".layers." in n or "projector" in n)]
        known = {id(p) for p in matrices}
        self.muon = Muon(matrices, lr=0.0, weight_decay=0.01)
        self.adam = torch.optim.AdamW(
            [p for _, p in named if id(p) not in known], lr=0.0, betas=(0.9, 0.97), weight_decay=0.0
        )
        self.stage = self.step = 0
        self.seconds = 0.0
        self.packer = TextPacker()
        tiles = sizes.architecture == "llava_next"
        tile = sizes.image_size if tiles else None
        self.view = View(sizes.image_size * (2 if tiles else 1), sizes.patch_size, tile)

    @property
    def state_path(self) -> Path:
        """Where the checkpoint lies."""
        return self.out / "state.pt"

    @property
    def log_path(self) -> Path:
        """Where measurements go, one JSON object per line."""
        return self.out / "log.jsonl"

    def save(self) -> None:
        """Write a checkpoint that is there either wholly or not at all."""
        state = {
            "model": self.model.state_dict(),
            "heads": self.heads.state_dict(),
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
            "stage": self.stage,
            "step": self.step,
            "seconds": self.seconds,
        }
        partial = self.state_path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self.state_path)

    def resume(self) -> bool:
        """Go on from the checkpoint, if there is one."""
        if not self.state_path.exists():
            self.log_path.unlink(missing_ok=True)
            return False
        state = torch.load(self.state_path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.heads.load_state_dict(state["heads"])
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.stage, self.step, self.seconds = state["stage"], state["step"], state["seconds"]
        self._forget_lines_after(self.stage, self.step)
        return True

    def _forget_lines_after(self, stage: int, step: int) -> None:
        if not self.log_path.exists():
            return
        lines = [json.loads(line) for line in self.log_path.read_text().splitlines()]
        kept = [line for line in lines if (line["stage"], line["step"]) <= (stage, step)]
        self.log_path.write_text("".join(json.dumps(line) + "\n" for line in kept))

    def log(self, record: dict[str, Any]) -> None:
        """Append a measurement."""
        record = {"stage": self.stage, "step": self.step, "minutes": round(self.seconds / 60, 3), **record}
        with self.log_path.open("a") as stream:
            stream.write(json.dumps(record) + "\n")

    def train(self, stop_after: int | None = None, say: Callable[[str], None] = print) -> None:
        """Run the stages that are left.

        Parameters
        ----------
        stop_after
            Leave after this many steps of this call without a last checkpoint, as a kill would.
        say
            Where progress goes.
        """
        say("resumed" if self.resume() else "started")
        done = 0
        saved = time.monotonic()
        while self.stage < len(self.config.stages):
            stage = self.config.stages[self.stage]
            for parameter in [*self.model.model.vision_tower.parameters(), *self._projector()]:
                parameter.requires_grad_(stage.train_vision)
            if self.step == 0:
                scale_words(self.model, stage.word_scale)
            data = self._data(stage)
            clock = time.monotonic()
            sums: dict[str, list[float]] = defaultdict(list)
            for batch in batches(data, self.step, self.config.workers):
                for name, value in self._update(stage, batch).items():
                    sums[name].append(value)
                self.step += 1
                done += 1
                now = time.monotonic()
                self.seconds += now - clock
                clock = now
                if self.step % self.config.log_every == 0 or self.step == stage.steps:
                    means = {name: round(sum(values) / len(values), 4) for name, values in sums.items()}
                    self.log(means)
                    say(self._progress(stage, means))
                    sums.clear()
                if stage.language and (self.step % self.config.evaluate_every == 0 or self.step == stage.steps):
                    accuracy = self.evaluate()
                    self.log({f"dev/{name}": round(value, 4) for name, value in accuracy.items()})
                    say("   dev " + "  ".join(f"{name} {100 * value:.0f}" for name, value in accuracy.items()))
                    draw_curves(self.log_path, self.out / "curves.png", self.config)
                if now - saved > 60 * self.config.checkpoint_minutes:
                    self.save()
                    saved = time.monotonic()
                if stop_after is not None and done >= stop_after:
                    return
                clock = time.monotonic()
            self.stage += 1
            self.step = 0
            self.save()
        draw_curves(self.log_path, self.out / "curves.png", self.config)
        export(self.model, self.config.model, self.out / "export")
        say(f"finished after {self.seconds / 60:.1f} minutes; weights in {self.out / 'export'}")

    def _projector(self) -> list[Tensor]:
        return list(self.model.model.multi_modal_projector.parameters())

    def _data(self, stage: Stage) -> Scenes:
        # Every stage takes its own hundred million training seeds.
        first = 100_000_000 * (self.stage % 10)
        styles: tuple[Style, ...] = tuple(style.style() for style in stage.scenes)
        return Scenes(styles, stage.batch, first, stage.steps, self.view, stage.per_family)

    def _update(self, stage: Stage, batch: Batch) -> dict[str, float]:
        share = self._rate(stage)
        for optimiser, peak in ((self.adam, stage.adam), (self.muon, stage.muon)):
            for group in optimiser.param_groups:
                group["lr"] = peak * share
        loss, report = self.losses(stage, batch)
        for optimiser in (self.adam, self.muon):
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        parameters = [*self.model.parameters(), *self.heads.parameters()]
        report["gradient"] = torch.nn.utils.clip_grad_norm_(parameters, 1.0).item()
        self.adam.step()
        self.muon.step()
        return report

    def losses(self, stage: Stage, batch: Batch) -> tuple[Tensor, dict[str, float]]:
        """Weighted loss of a stage on a batch, and what to report."""
        tokens, cls = self.objective.encode(batch.pixels, batch.corner)
        total = torch.zeros(())
        report: dict[str, float] = {}
        if stage.align:
            align, report = self.objective.alignment(batch, tokens, cls)
            report["align"] = align.item()
            total = total + stage.align * align
        if stage.language:
            prompt = self.objective.prompt(batch, tokens)
            if stage.grounding:
                grounding, report["grounding"] = self.objective.grounding(batch, prompt)
                total = total + stage.grounding * grounding
            if stage.tally:
                tally = self.objective.tally(batch, prompt)
                report["tally"] = tally.item()
                total = total + stage.tally * tally
            language, right = self.objective.language(batch, prompt, stage.counting)
            report["language"] = language.item()
            total = total + stage.language * language
            chosen = batch.target >= 0
            report["token accuracy"] = right[chosen].float().mean().item()
        report["loss"] = total.item()
        return total, report

    def _rate(self, stage: Stage) -> float:
        if self.step < stage.warmup:
            return (self.step + 1) / stage.warmup
        along = (self.step - stage.warmup) / max(1, stage.steps - stage.warmup)
        return stage.final + (1 - stage.final) * 0.5 * (1 + math.cos(math.pi * along))

    def _progress(self, stage: Stage, means: dict[str, float]) -> str:
        left = stage.steps - self.step
        pace = self.seconds / 60 / max(1, self._steps_done())
        later = sum(s.steps for s in self.config.stages[self.stage + 1 :])
        shown = "  ".join(f"{k} {v:.3f}" for k, v in means.items() if k != "gradient")
        return (
            f"{stage.name} {self.step}/{stage.steps}  {self.seconds / 60:.1f} min, "
            f"about {pace * (left + later):.0f} left  {shown}"
        )

    def _steps_done(self) -> int:
        return sum(s.steps for s in self.config.stages[: self.stage]) + self.step

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Share of dev questions answered right, per family, by the packed pass (equal to greedy exact match)."""
        style = self.config.stages[-1].scenes[0].style()
        hits: dict[str, list[bool]] = {family: [] for family in FAMILIES}
        names = list(FAMILIES)
        for first in range(0, self.config.evaluate_scenes, 8):
            count = min(8, self.config.evaluate_scenes - first)
            scenes = [make_scene(seed_for("dev", first + k), style) for k in range(count)]
            batch = make_batch(scenes, self.view, questions, 2, self.packer)
            tokens, _ = self.objective.encode(batch.pixels, batch.corner)
            _, right = self.objective.language(batch, self.objective.prompt(batch, tokens))
            for row in range(count):
                for number in range(int(batch.block[row].max()) + 1):
                    mine = batch.block[row] == number
                    hits[names[int(batch.family[row][mine][0])]].append(bool(right[row][mine].all()))
        result = {family: sum(values) / max(1, len(values)) for family, values in hits.items()}
        everything = [hit for values in hits.values() for hit in values]
        return {"all": sum(everything) / max(1, len(everything)), **result}


def main() -> None:
    """Read the command line and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    Run(load_config(arguments.config), arguments.out).train(say=lambda line: print(line, flush=True))


if __name__ == "__main__":
    main()
