"""Tokens, floating-point operations and price of a step, from the expected rows."""

from dataclasses import dataclass

from realhf.api.graph import MFC, Kind
from realhf.arch.flops import forward_flops, generate_flops, train_flops
from realhf.plan.search.candidates import Candidates


@dataclass(frozen=True)
class StepWork:
    """The work of one step: ``tokens`` of the rows that are trained (or else generated, or else read), and FLOPs.

    ``word`` says which tokens are counted. Model FLOPs do not include recomputation, as in the usual MFU.
    """

    tokens: int
    word: str
    flops: float


@dataclass(frozen=True)
class Economy:
    """Rates and price of a step that takes ``seconds`` on ``n_workers``; ``mfu`` is 0 if the peak is unknown."""

    seconds: float
    n_workers: int
    tokens_per_s: float
    word: str
    mfu: float
    dollars_per_hour: float

    @property
    def tokens_per_s_per_worker(self) -> float:
        return self.tokens_per_s / self.n_workers

    @property
    def worker_hours(self) -> float:
        """Hours of workers per step."""
        return self.n_workers * self.seconds / 3600

    @property
    def dollars(self) -> float:
        """Dollars per step; 0 if no price is set."""
        return self.worker_hours * self.dollars_per_hour


def step_work(calls: Candidates, mfcs: tuple[MFC, ...]) -> StepWork:
    tokens: dict[Kind, int] = {}
    flops = 0.0
    for mfc in mfcs:
        if mfc.role is None:
            continue
        n_calls = max(1, calls.batch_size // min(mfc.batch_size, calls.batch_size))
        call_tokens, call_flops = _of_call(calls, mfc)
        flops += n_calls * call_flops
        tokens[mfc.kind] = max(tokens.get(mfc.kind, 0), n_calls * call_tokens)
    words = {Kind.TRAIN: "trained", Kind.GENERATE: "generated", Kind.INFERENCE: "read"}
    kind = next((kind for kind in words if kind in tokens), Kind.INFERENCE)
    return StepWork(tokens.get(kind, 0), words[kind], flops)


def _of_call(calls: Candidates, mfc: MFC) -> tuple[int, float]:
    """Return the tokens and the FLOPs of one call; the tokens of a generation are its new ones."""
    assert mfc.role is not None
    model, workload = calls.cost.models[mfc.role], calls.cost.workload
    (rows,) = calls.rows(mfc, 1)
    if mfc.kind is Kind.TRAIN:
        return sum(rows.lengths), train_flops(model, rows.lengths)
    if mfc.kind is Kind.INFERENCE:
        return sum(rows.lengths), forward_flops(model, rows.lengths)
    responses = [workload.responses_at(row.prompt)[: 1 if mfc.per_prompt else None] for row in rows.ids]
    whole = [prompt + n for prompt, some in zip(rows.lengths, responses, strict=True) for n in some]
    return sum(map(sum, responses)), generate_flops(model, rows.lengths, whole)


def economy(work: StepWork, seconds: float, n_workers: int, peak_flops: float, dollars_per_hour: float) -> Economy:
    mfu = work.flops / (seconds * n_workers * peak_flops) if peak_flops and seconds else 0.0
    rate = work.tokens / seconds if seconds else 0.0
    return Economy(seconds, n_workers, rate, work.word, mfu, dollars_per_hour)
