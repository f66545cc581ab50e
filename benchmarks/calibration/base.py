"""Step times of base engines, fitted to measured TPOT: `python -m benchmarks.calibration base TABLE [FILE]`.

TABLE is base_engines.csv.gz, from silicon_sample.csv of ai-dynamo/aiconfigurator (Apache-2.0). Prints, for each setup,
how far constants fitted on half of its cells are off on the other half, both ways; FILE gets those fitted on all.

A cell is a closed loop of `batch` requests with `isl` prompt and `osl` answer tokens. Its steps decode for those that
run, and each token waits for its share of the prompts of the others. How many run follows from the measured TTFT. A
setup's constants are multiples of what the data sheets and the model's shape say; where its rows say little, they stay
near the multiples of the same model, engine and version.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.optimize import least_squares

from backends.calibration.base_engines import GRAPH_TOKENS, BaseEngine, BaseModel, base_models
from backends.calibration.base_engines import base_engines as known_engines
from backends.calibration.calibration import StepTime
from backends.calibration.gpus import Precision, gpus

Floats = npt.NDArray[np.float64]

CHUNK_TOKENS = 8192
"""`max_num_batched_tokens`: what of a prompt a step computes."""
ERROR = 0.03
"""Standard error of a measured TPOT, relative."""
FIRST = np.array([0.8, 0.0, 0.9, 1.2, 0.0, 0.0, 0.0])
SPREAD = np.array([0.65, 0.35, 0.8, 0.6, 1.0, 1.0, 0.1])
"""Prior of the logs of the multiples before any setup was fitted, and its standard deviation."""
LEAST_ROWS = 5  # of a half for a setup to be judged, and of a setup to be in the file
_ATTENTION = 0.576
"""Share of the FLOP/s that attention over a prompt reaches: llama-3.1-8b-h100's `per_attended_s`."""
_MODELS = (
    ("Llama-3.1-8B", "llama-3.1-8b"),
    ("Llama-3.1-70B", "llama-3.1-70b"),
    ("Qwen3-32B", "qwen3-32b"),
    ("Qwen3-235B", "qwen3-235b-a22b"),
    ("Qwen3.5-397B", "qwen3.5-397b-a17b"),
    ("gpt-oss-120b", "gpt-oss-120b"),
    ("DeepSeek-R1", "deepseek-r1"),
    ("DeepSeek-V3", "deepseek-v3"),
    ("MiniMax", "minimax-m2.5"),
    ("GLM-5", "glm-5"),
    ("Kimi-K2", "kimi-k2.5"),
)


@dataclass(frozen=True, slots=True)
class Setup:
    """An engine as it was started."""

    engine: str
    version: str
    model: str
    system: str
    precision: str
    tp: int
    attention_dp: int
    moe_tp: int
    moe_ep: int

    @property
    def gpus(self) -> int:
        """Number of GPUs; where both kinds of parallelism of experts are stated alike, `tp` is their product."""
        return self.moe_tp if self.moe_tp == self.moe_ep > 1 else max(self.tp, self.moe_ep)

    @property
    def known(self) -> BaseModel | None:
        """The model's shape, if it is known."""
        name = next((name for part, name in _MODELS if part in self.model), None)
        return base_models()[name] if name else None

    @property
    def weights(self) -> Precision:
        """Precision of the weights; where none is stated, the times are those of BF16."""
        return Precision(self.precision or "bf16")

    @property
    def name(self) -> str:
        """The name of the calibration."""
        assert self.known is not None
        number = f"{self.gpus}x" if self.gpus > 1 else ""
        parallel = (
            f"-dp{self.attention_dp}" if self.attention_dp > 1 else f"-ep{self.moe_ep}" if self.moe_ep > 1 else ""
        )
        engine = "" if self.engine == "vllm" else f"-{self.engine}"
        return f"{number}{self.system.removesuffix('_sxm')}/{self.known.model}/{self.weights}{parallel}{engine}"


@dataclass(frozen=True, slots=True)
class Cells:
    """Cells of a setup, each an array of the same length."""

    isl: Floats
    osl: Floats
    batch: Floats
    ttft_ms: Floats
    tpot_ms: Floats

    def where(self, chosen: npt.NDArray[np.bool_]) -> Cells:
        """Return some of the cells."""
        return Cells(*(getattr(self, name)[chosen] for name in self.__slots__))


def read(table: Path) -> dict[Setup, Cells]:
    """Return the cells of the table by setup, without rows that are in it twice."""
    rows: dict[Setup, set[tuple[float, ...]]] = defaultdict(set)
    with gzip.open(table, "rt", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            sizes = [int(row[key] or 1) for key in ("tp_size", "attention_dp_size", "moe_tp_size", "moe_ep_size")]
            setup = Setup(
                row["backend"], row["backend_version"], row["model_path"], row["system"], row["precision"], *sizes
            )
            cell = (row["isl"], row["osl"], row["batch_size"], row["silicon_ttft_ms"], row["silicon_tpot_ms"])
            rows[setup].add(tuple(map(float, cell)))
    if unknown := sorted({setup.model for setup in rows if not setup.known}):
        print(f"left out, as base_models.csv has no shape of them: {', '.join(unknown)}", file=sys.stderr)
    return {setup: Cells(*np.array(sorted(cells)).T) for setup, cells in rows.items() if setup.known}


def halves(setup: Setup, cells: Cells) -> npt.NDArray[np.bool_]:
    """Return which cells are in the first half: those of the same lengths and batch are in the same."""
    keys = zip(cells.isl, cells.osl, cells.batch, strict=True)
    return np.array([hashlib.sha256(repr((setup, *map(int, key))).encode()).digest()[0] % 2 == 0 for key in keys])


def by_data_sheet(setup: Setup) -> Floats:
    """Return the ms of base, experts, a token, a prompt's token, 1,000 tokens of context, no graph, a pair."""
    model, number = setup.known, setup.gpus
    assert model is not None
    gpu, bytes_each = gpus()[setup.system.removesuffix("_sxm")], setup.weights.bytes_per_weight
    read_gb = np.array([(model.parameters_b - model.experts_b), model.experts_b]) * bytes_each / number
    token_ms = 2 * model.active_b / gpu.tflops[setup.weights] / number
    context_ms = model.kv_kib_per_token * 1.024 / 1e3 / gpu.bandwidth_tb_s / min(number, 8)
    base_ms, experts_ms = read_gb / gpu.bandwidth_tb_s + [2.0, 0.0]  # and what each step costs besides
    pair_ms = model.pair_mflop / _ATTENTION / gpu.tflops[Precision.BF16] / number / 1e3
    return np.array([base_ms, experts_ms, token_ms, token_ms, context_ms, 5.0, pair_ms])


def constants_ms(known: BaseEngine | StepTime) -> Floats:
    """Return the same of an engine whose step times are known."""
    times = (known.base_s, known.experts_s, known.per_token_below_knee_s, known.per_token_above_knee_s)
    return 1e3 * np.array([*times, 1e3 * known.per_context_token_s, known.no_graph_s, known.per_attended_s])


def tpot_ms(constants_ms: Floats, share: float, cells: Cells) -> Floats:
    """Return the time per output token that a setup's constants give for cells."""
    base, experts, token, prompt_token, context, no_graph, pair = constants_ms

    def tokens_ms(tokens: Floats) -> Floats:
        beyond = np.maximum(tokens - GRAPH_TOKENS, 0)
        read = experts * (1 - (1 - share) ** tokens)
        return np.asarray(token * (tokens - beyond) + prompt_token * beyond + no_graph * (beyond > 0) + read)

    chunks = np.ceil(cells.isl / CHUNK_TOKENS)

    def loop_ms(running: Floats) -> Floats:
        prompts = np.maximum(running - 1, 0) / cells.osl * chunks  # of the others, in a step
        mixed = tokens_ms(running + cells.isl / chunks) - tokens_ms(running)
        held = running * (cells.isl + cells.osl / 2) / 1e3
        return np.asarray(
            base + tokens_ms(running) + prompts * (mixed + pair * cells.isl**2 / 2 / chunks) + context * held
        )

    found = loop_ms(cells.batch)
    for _ in range(10):
        decoding = cells.osl * found
        found = (found + loop_ms(cells.batch * decoding / (decoding + cells.ttft_ms))) / 2
    return found


def fit(setup: Setup, cells: Cells, prior: Floats, spread: Floats) -> Floats:
    """Return the logs of a setup's multiples, by its cells and a prior; a cell far off pulls no harder for it."""
    sheet, measured = by_data_sheet(setup), np.log(cells.tpot_ms)
    assert setup.known is not None
    share = setup.known.expert_share

    def residuals(logs: Floats) -> Floats:
        off = (np.log(tpot_ms(sheet * np.exp(logs), share, cells)) - measured) / ERROR
        return np.concatenate([np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1)), (logs - prior) / spread])

    return np.asarray(least_squares(residuals, prior, max_nfev=40).x)


def fit_all(cells_of: Mapping[Setup, Cells]) -> dict[Setup, Floats]:
    """Return the constants of all setups, in milliseconds, each shrunk towards those that are like it."""
    levels: Sequence[Callable[[Setup], object]] = (
        lambda setup: setup.known,
        lambda setup: (setup.known, setup.engine, setup.precision),
        lambda setup: (setup.known, setup.engine, setup.version, setup.system, setup.precision),
    )
    weight = {setup: len(cells.batch) / (len(cells.batch) + 3) for setup, cells in cells_of.items()}
    prior, spread = dict.fromkeys(cells_of, FIRST), SPREAD
    for _ in range(3):
        logs = {setup: fit(setup, cells, prior[setup], spread) for setup, cells in cells_of.items()}
        mean = sum(weight[setup] * logs[setup] for setup in logs) / sum(weight.values())
        prior = dict.fromkeys(logs, np.asarray(mean))
        for level in levels:
            members = defaultdict(list)
            for setup in logs:
                members[level(setup)].append(setup)
            for alike in members.values():
                total = 1 + sum(weight[setup] for setup in alike)
                shift = sum(weight[setup] * (logs[setup] - prior[setup]) for setup in alike) / total
                prior |= {setup: prior[setup] + shift for setup in alike}
        off = np.array(
            [logs[setup] - prior[setup] for setup, cells in cells_of.items() if len(cells.batch) >= LEAST_ROWS]
        )
        spread = np.clip(1.3 * np.quantile(np.abs(off), 0.683, axis=0), 0.1, 1.2)
    return {setup: by_data_sheet(setup) * np.exp(fit(setup, cells_of[setup], prior[setup], spread)) for setup in logs}


def held_out(cells_of: Mapping[Setup, Cells]) -> dict[Setup, Floats]:
    """Return the errors of each setup on the half that its constants were not fitted on, both ways."""
    errors: dict[Setup, list[Floats]] = defaultdict(list)
    first = {setup: halves(setup, cells) for setup, cells in cells_of.items()}
    for way in (True, False):
        known = {s: cells.where(first[s] == way) for s, cells in cells_of.items() if (first[s] == way).any()}
        for setup, constants in fit_all(known).items():
            others = cells_of[setup].where(first[setup] != way)
            if len(known[setup].batch) >= LEAST_ROWS and len(others.batch) and setup.known:
                errors[setup].append(tpot_ms(constants, setup.known.expert_share, others) / others.tpot_ms - 1)
    return {setup: np.concatenate(each) for setup, each in errors.items()}


def base_engines(table: Path) -> Iterable[str]:
    """Yield the error of each setup, and of all."""
    errors = held_out(read(table))
    for setup in sorted(errors, key=lambda each: (each.engine != "vllm", each.name, each.version)):
        off = np.abs(errors[setup])
        median, most = np.median(off), np.quantile(off, 0.9)
        yield f"{setup.name} | {setup.engine} {setup.version} | {len(off)} | {median:.1%} | {most:.1%}"
    for engine in ("vllm", "sglang", "trtllm", ""):
        off = np.abs(np.concatenate([each for setup, each in errors.items() if engine in setup.engine]))
        yield f"*all* | {engine or 'all'} | {len(off)} | {np.median(off):.1%} | {np.quantile(off, 0.9):.1%}"


def other_versions(table: Path) -> Iterable[str]:
    """Yield how far the constants of the file are off on vLLM's cells of other versions."""
    off = [np.zeros(0)]
    for setup, cells in read(table).items():
        there = known_engines().get(setup.name)
        if there is None or setup.engine != "vllm" or there.engine == f"{setup.engine} {setup.version}".strip():
            continue
        assert setup.known is not None
        off.append(np.abs(tpot_ms(constants_ms(there), setup.known.expert_share, cells) / cells.tpot_ms - 1))
    all_off = np.concatenate(off)
    yield f"*other versions* | vllm | {len(all_off)} | {np.median(all_off):.1%} | {np.quantile(all_off, 0.9):.1%}"


def write(table: Path, file: Path) -> None:
    """Write the constants of the setups with enough rows, of each name that with the most."""
    cells_of = read(table)
    constants, errors = fit_all(cells_of), held_out(cells_of)
    best: dict[str, Setup] = {}
    for setup in sorted(cells_of, key=lambda each: (len(cells_of[each].batch), each.version)):
        if len(cells_of[setup].batch) >= LEAST_ROWS:
            best[setup.name] = setup
    with file.open("w", encoding="utf-8", newline="") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(BaseEngine._fields)
        for name, setup in sorted(best.items(), key=lambda each: (each[1].engine != "vllm", each[0])):
            model, engine = setup.known, f"{setup.engine} {setup.version}".strip()
            assert model is not None
            base, experts, token, prompt_token, context, no_graph, pair = 1e-3 * constants[setup]
            times = (base, experts, token, prompt_token, 1e-3 * context, no_graph, pair)
            gpu = gpus()[setup.system.removesuffix("_sxm")].name
            rows, off = len(cells_of[setup].batch), np.abs(errors.get(setup, np.zeros(0)))
            error = (len(off), f"{np.median(off):.3g}", f"{off.max():.3g}") if len(off) else (0, 0, 0)
            known = (name, model.model, engine, gpu, setup.gpus, setup.weights, *(f"{t:.3g}" for t in times), rows)
            writer.writerow((*known, *error))
