"""colab/compose_a_loss.ipynb: runs from top to bottom, and says what it should."""

import pathlib

import nbformat
import pytest

NOTEBOOK = pathlib.Path(__file__).parents[2] / "colab" / "compose_a_loss.ipynb"


@pytest.mark.slow
def test_runs_from_top_to_bottom(run):
    """Every assertion in it holds, or nbclient raises: GRPO by hand, the laws, the faults that are found."""
    nb = run(nbformat.read(NOTEBOOK, as_version=4), NOTEBOOK.parent)
    code = {cell.id: cell for cell in nb.cells if cell.cell_type == "code"}
    assert [cell.execution_count for cell in code.values()] == list(range(1, len(code) + 1))

    def said(cell):
        return "".join(output.get("text", "") for output in code[cell].outputs)

    assert "library 0.0043" in said("hand")
    assert "move it before stage 1" in said("chain")
    assert "obeys the laws" in said("new") and "split" in said("broken")
    assert "mean reward of the first five steps" in said("train")
    (figure,) = (o.data for o in code["weights"].outputs if "application/vnd.plotly.v1+json" in o.get("data", {}))
    curves = {trace["name"]: trace["y"] for trace in figure["application/vnd.plotly.v1+json"]["data"]}
    assert curves.keys() == {"grpo", "dr_grpo", "maxrl"}
    for values in curves.values():  # the fewer answers are right, the more a right one weighs
        assert all(a > b for a, b in zip(values, values[1:], strict=False))
