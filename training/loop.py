"""What all stages share: the training loop, averaged weights, the loss curve, the files.

The models are so small that launching their kernels takes longer than running them, so on a GPU a whole step
(drawing the batch, forward, backward, AdamW, averaging) is one CUDA graph that is replayed.
"""

import copy
import csv
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

WARM_UP = 200  # steps until the full learning rate
Loss = Callable[[], dict[str, Tensor]]


class Training:
    """AdamW with warm-up and cosine decay for some modules, each with its own rate.

    `averages` are copies of the modules that follow them slowly and end as averages over the last eighth of the steps.
    """

    def __init__(self, modules: Mapping[str, tuple[nn.Module, float]], steps: int) -> None:
        self.steps, self.rates = steps, [rate for _, rate in modules.values()]
        self.modules = [module.train() for module, _ in modules.values()]
        self.averages = {
            name: copy.deepcopy(module).eval().requires_grad_(False) for name, (module, _) in modules.items()
        }
        self.device = next(self.modules[0].parameters()).device
        self.decay = 1 - 8 / max(steps, 16)
        groups = [
            {"params": list(module.parameters()), "lr": torch.zeros((), device=self.device)} for module in self.modules
        ]
        self.optimizer = torch.optim.AdamW(
            groups, lr=torch.zeros((), device=self.device), betas=(0.9, 0.99), weight_decay=0.01,
            fused=True, capturable=self.device.type == "cuda",
        )  # fmt: skip

    def run(self, losses: Sequence[Loss], curve: Path, before: Callable[[int], None] = lambda step: None) -> None:
        """Take the losses in turn, a step each, and save their curve as PNG and CSV. `before(step)` may change the
        data that the losses draw from, in place."""
        started = time.perf_counter()
        steps = {loss: self._repeatable(loss) for loss in losses}
        names = list(losses[0]())
        history = torch.zeros(self.steps, len(names), device=self.device)
        print(f"{curve.stem}: ready after {time.perf_counter() - started:.1f} s", flush=True)
        for index in range(self.steps):
            before(index)
            self._set_rates(index)
            history[index] = steps[losses[index % len(losses)]]()
            if (index + 1) % max(1, self.steps // 20) == 0:
                recent = history[max(0, index - 99) : index + 1].mean(0).tolist()
                told = ", ".join(f"{name} {value:.4f}" for name, value in zip(names, recent, strict=True))
                print(f"{curve.stem}: {index + 1} steps, {time.perf_counter() - started:.1f} s, {told}", flush=True)
        save_curve(curve, names, history.cpu())

    def _step(self, loss: Loss) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        parts = loss()
        torch.stack(list(parts.values())).sum().backward()
        for group in self.optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], 1.0)
        self.optimizer.step()
        for module, average in zip(self.modules, self.averages.values(), strict=True):
            torch._foreach_lerp_(list(average.parameters()), list(module.parameters()), 1 - self.decay)
        return torch.stack([part.detach() for part in parts.values()])

    def _repeatable(self, loss: Loss) -> Callable[[], Tensor]:
        self._set_rates(0)
        if self.device.type != "cuda":
            return lambda: self._step(loss)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # lazy initialisation and compilation cannot be captured
                self._step(loss)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = self._step(loss)

        def replay() -> Tensor:
            graph.replay()
            return result

        return replay

    def _set_rates(self, step: int) -> None:
        part = min(1.0, (step + 1) / WARM_UP) * (0.5 + 0.5 * math.cos(math.pi * step / self.steps))
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"].fill_(rate * part)


def save_curve(path: Path, names: Sequence[str], history: Tensor) -> None:
    """Means over a hundredth of the run each, as path.csv and path.png."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    stride = max(1, len(history) // 100)
    means = torch.stack([part.mean(0) for part in history.split(stride)])
    steps = [min(len(history), stride * (i + 1)) for i in range(len(means))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *names])
        writer.writerows(
            [step, *(f"{value:.5g}" for value in row)] for step, row in zip(steps, means.tolist(), strict=True)
        )
    figure, axes = pyplot.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(steps, means, label=list(names), linewidth=1)
    axes.set(xlabel="step", ylabel="loss", yscale="log", title=path.stem)
    axes.legend(fontsize="small")
    figure.savefig(path.with_suffix(".png"), dpi=90)
    pyplot.close(figure)


def save_weights(module: nn.Module, path: Path, **config: Any) -> None:
    """bfloat16 safetensors; `config` goes into the metadata as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().to("cpu", torch.bfloat16).contiguous() for name, value in module.state_dict().items()
    }
    save_file(tensors, path, metadata={"config": json.dumps(config)} if config else None)
    print(f"{path}: {path.stat().st_size:,} bytes", flush=True)


def save_scores(path: Path, scores: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(scores, indent=1) + "\n")
    print(json.dumps(scores), flush=True)
