"""Claims over the rows of a table: those rows that were run."""

from __future__ import annotations

from collections.abc import Sequence

from reproduce.entry import Claim
from reproduce.per_fedavg.personal import AFTER
from reproduce.per_fedavg.rows import FEDAVG, FO, HF, METHODS, Row
from reproduce.results import Judged, Results, judge_factory, larger_lead, told


@judge_factory
def ahead(results: Results, better: str, worse: str, rows: Sequence[Row], *, by: float = 0.0) -> Judged:
    """``better`` is more than ``by`` ahead of ``worse`` after a step, in every row of ``rows`` that was run, in the mean of
    the paired differences."""
    leads = {
        row.name: results.lead(row.arm(better), row.arm(worse), AFTER)
        for row in rows
        if row.arm(better) in results.figures
    }
    held = bool(leads) and all(each.mean() > by for each in leads.values())
    return Judged(held, "; ".join(f"{name}: {told(each)}" for name, each in leads.items()))


@judge_factory
def change(
    results: Results, method: str, start: Row, end: Row, figure: str, *, least: float, most: float
) -> Judged:
    """From ``start`` to ``end`` the method's figure changes by ``least`` to ``most``, in the mean of the paired
    differences."""
    changed = results.lead(end.arm(method), start.arm(method), figure)
    return Judged(bool(least <= changed.mean() <= most), told(changed))


@judge_factory
def fewer_steps_lower(results: Results, pairs: Sequence[tuple[Row, Row]], figure: str) -> Judged:
    """In each pair (few, many) that was run, every method ends below itself with the steps of ``many``, in the mean of the
    paired differences."""
    changed = {
        f"{few.data}, {method}": results.lead(few.arm(method), many.arm(method), figure)
        for few, many in pairs
        for method in METHODS
        if many.arm(method) in results.figures
    }
    held = bool(changed) and all(bool(each.mean() < 0) for each in changed.values())
    return Judged(held, "; ".join(f"{name}: {told(each)}" for name, each in changed.items()))


def claims_of_single_class(
    single: Row, than: Row, lead: str, raised: tuple[str, str, str], doubt: str
) -> tuple[Claim, ...]:
    """Claim 4: half B with a single class widens HF's lead, and raises every method. What was found elsewhere: ``lead`` in
    words, and by how much FedAvg, FO and HF were ``raised``; ``doubt`` is that of the first."""
    wide = Claim(
        "4",
        "a single class in half B widens HF's lead over FedAvg",
        lead,
        larger_lead((single.arm(HF), single.arm(FEDAVG)), (than.arm(HF), than.arm(FEDAVG)), AFTER),
        doubt=doubt,
    )
    return (
        wide,
        *(
            Claim(
                "4",
                f"a single class in half B raises {method}",
                found,
                change(method, than, single, AFTER, least=0, most=1),
            )
            for method, found in zip((FEDAVG, FO, HF), raised, strict=True)
        ),
    )
