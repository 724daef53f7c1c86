"""The inputs of a run: what their loading reports."""

from __future__ import annotations

from stoker.trainer.rank.run_inputs import percents


def test_each_percent_is_progress_and_a_line_names_the_tens() -> None:
    """A model of 400 GB over a slow link takes longer for a tenth than a rank may be silent."""
    reported: list[str] = []
    progress = percents(reported.append, "FetchingModel")
    for done in (0, 1, 9, 10, 10, 500, 1000):  # of 1000
        progress(done, 1000)
    lines = ["FetchingModel 0 %", "FetchingModel 0 %", "FetchingModel 50 %", "FetchingModel 100 %"]
    assert reported == lines, "one for each percent that is new"
