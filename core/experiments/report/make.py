"""From rows to a `Report`: the comparisons, the sample-ratio check, warnings, the verdict in words."""

from __future__ import annotations

from .compare import compare
from .ratio_check import check_ratio
from .result import Arm, Options, Report
from .table import Reader, Table
from .words import method, verdicts, warnings


def make_report(reader: Reader, options: Options) -> Report:
    """StartupError when there is nothing to report on."""
    return report_on(reader.table(options.seed), options)


def report_on(table: Table, options: Options) -> Report:
    comparisons = compare(table, options)
    ratio = check_ratio(table)
    arrivals = table.columns["arrival"]
    return Report(
        experiment=table.experiment,
        run=table.run,
        split=table.split,
        shared_steps=table.shared_steps,
        since=float(arrivals.min()) if len(table) else 0.0,
        until=float(arrivals.max()) if len(table) else 0.0,
        options=options,
        paired=table.design.paired,
        verdicts=verdicts(table, comparisons, ratio),
        warnings=warnings(table, ratio),
        arms=_arms(table),
        ratio_check=ratio,
        comparisons=comparisons,
        method=method(table, options),
    )


def _arms(table: Table) -> list[Arm]:
    tokens = table.columns["completion_tokens"]
    return [
        Arm(
            name=facts.name,
            control=i == 0,
            weight=facts.weight,
            config=facts.config,
            configs=facts.configs,
            requests=int((table.arm == i).sum()),
            units=table.units[i],
            output_tokens=int(tokens[table.arm == i].sum()),
            washout=facts.washout,
            excluded=dict(sorted(facts.excluded.items())),
            older=facts.older,
            unfinished=facts.unfinished,
        )
        for i, facts in enumerate(table.arms)
    ]
