"""Which rows are compared, which are left out and counted, and which belong together."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from tokenbus.core.errors import StartupError


def facts(table):
    return {arm.name: arm for arm in table.arms}


def test_columns_are_in_ms_and_the_control_comes_first(table_of, row):
    table = table_of(
        [row(arm="B", control=False), row(ttft=0.25, gaps=[1.0, 2.0, 4.0]), row(arm="B", control=False, ttft=None, gaps=[])]
    )
    assert [arm.name for arm in table.arms] == ["A", "B"]
    assert table.arm.tolist() == [1, 0, 1]
    assert table.columns["ttft"].tolist()[:2] == [100.0, 250.0]
    assert np.isnan(table.columns["ttft"][2])
    assert table.gaps.tolist() == [20.0, 22.0, 1.0, 2.0, 4.0]
    assert table.gap_row.tolist() == [0, 0, 1, 1, 1]


def test_what_is_left_out_is_counted_by_reason(table_of, row):
    rows = [
        row(),
        row(washout=True),
        row(excluded="client"),
        row(excluded="failed"),
        row(excluded="client"),
        row(arm="B", control=False),
    ]
    table = table_of(rows)
    assert len(table) == 2
    assert facts(table)["A"].washout == 1
    assert dict(facts(table)["A"].excluded) == {"client": 2, "failed": 1}


def test_gaps_stay_with_their_rows_when_others_are_left_out(table_of, row):
    rows = [
        row(config="old", gaps=[1.0], arrival=10.0),
        row(config="new", gaps=[2.0, 3.0], arrival=20.0),
        row(arm="B", gaps=[9.0], arrival=15.0),
        row(arm="B", gaps=[4.0], arrival=25.0),
    ]
    table = table_of(rows)
    assert table.gaps.tolist() == [2.0, 3.0, 4.0]
    assert table.gap_row.tolist() == [0, 0, 1]
    assert (facts(table)["A"].older, facts(table)["B"].older, facts(table)["A"].configs) == (1, 1, 2)


def test_the_newest_run_is_taken_or_the_one_asked_for(table_of, row):
    rows = [row(run=1, ttft=1.0), row(run=2, ttft=2.0), row(run=1, ttft=1.5), row(run=2, ttft=2.5)]
    newest = table_of(rows)
    assert (newest.run, newest.columns["ttft"].tolist()) == (2, [2000.0, 2500.0])
    assert table_of(rows, run=1).columns["ttft"].tolist() == [1000.0, 1500.0]
    with pytest.raises(StartupError, match="of run 3"):
        table_of(rows, run=3)


def test_several_experiments_need_a_choice(table_of, row):
    rows = [row(), row(experiment="other")]
    with pytest.raises(StartupError, match="cache, other"):
        table_of(rows)
    assert len(table_of(rows, experiment="other")) == 1
    with pytest.raises(StartupError, match="no rows of experiment third"):
        table_of(rows, experiment="third")


def test_units_are_clusters_of_their_own_arm(table_of, row):
    units = [("A", "x"), ("A", "y"), ("B", "z"), ("A", "x"), ("B", "w"), ("B", "z")]
    table = table_of([row(arm=arm, unit=unit, split="user") for arm, unit in units])
    assert table.design.sizes == (2, 2)
    assert not table.design.paired
    assert table.units == (2, 2)
    for arm in (0, 1):
        of_unit = {}
        for (_, unit), mine, cluster in zip(units, table.arm == arm, table.cluster, strict=True):
            if mine:
                of_unit.setdefault(unit, set()).add(int(cluster))
        assert sorted(of_unit.values(), key=min) == [{0}, {1}]


def test_very_many_units_become_groups_by_their_hash(table_of, row):
    table = table_of([row(unit=f"{i % 2000:016x}", split="user") for i in range(4000)])
    assert table.units == (2000,)
    assert 350 < table.design.sizes[0] <= 400
    assert table.cluster[:2000].tolist() == table.cluster[2000:].tolist()
    assert table.cluster.max() < table.design.sizes[0]


def sliced(row, order, **changes):
    return [row(arm=arm, split="slice", slice=i, unit="", arrival=60.0 * i, **changes) for i, arm in enumerate(order)]


def test_slices_are_paired_by_block_and_the_newest_is_left_out(table_of, row):
    table = table_of(sliced(row, "ABBAABBA"))
    assert table.design.paired
    assert table.design.sizes == (3, 3)  # slice 7 may still be running, so its block isn't whole
    assert table.cluster.tolist() == [0, 0, 1, 1, 2, 2]
    assert [arm.unfinished for arm in table.arms] == [1, 1]


def test_blocks_follow_the_weights(table_of, row):
    """Two slices of A and one of B in each block, the last of which lacks B."""
    shares = {"A": 2 / 3, "B": 1 / 3}
    rows = [msgspec.structs.replace(one, weight=shares[one.arm]) for one in sliced(row, "AABBAAABAAAB")]
    table = table_of(rows)
    assert table.design.paired
    assert table.cluster.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert [arm.unfinished for arm in table.arms] == [2, 1]


def test_longer_blocks_are_recognised(table_of, row):
    """Weights 2 and 2: blocks of four, as AABB could not be two blocks of two."""
    table = table_of(sliced(row, "AABBABABA"))
    assert table.cluster.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_slices_without_blocks_are_compared_unpaired(table_of, row, report_of):
    rows = sliced(row, "A" * 33 + "B" * 33)
    table = table_of(rows)
    assert not table.design.paired
    assert table.design.sizes == (33, 32)
    assert any("unpaired" in warning for warning in report_of(rows).warnings)


def test_an_arm_that_was_switched_off_is_remembered(table_of, row):
    table = table_of(
        [row(), row(arm="B", arrival=5.0), row(arm="B", arrival=70.0, excluded="tripped", weight=0.0), row(arrival=90.0)]
    )
    assert facts(table)["B"].until == 70.0
    assert facts(table)["B"].weight == 0.5


def test_a_reader_can_go_on_after_a_look(row):
    from tokenbus.core.experiments.report.table import Reader

    reader = Reader()
    reader.add([row(unit="a")])
    assert len(reader.table(1)) == 1
    reader.add([row(unit="b"), row(unit="a")])
    assert len(reader.table(1)) == 3
