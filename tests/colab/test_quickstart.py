"""colab/quickstart.ipynb: runs from top to bottom in a clean kernel, and is committed without outputs."""

import json
import pathlib
import re

import nbformat
import pytest
from nbclient.exceptions import CellExecutionError

ROOT = pathlib.Path(__file__).parents[2]
NOTEBOOK = ROOT / "colab" / "quickstart.ipynb"
PLOTLY = "application/vnd.plotly.v1+json"  # MIME type of a figure


def notebook(last=None):
    """The committed notebook, or its cells up to the one with the id `last`."""
    nb = nbformat.read(NOTEBOOK, as_version=4)
    if last is not None:
        end = [cell.id for cell in nb.cells].index(last)
        nb.cells = nb.cells[: end + 1]
    return nb


def texts(nb):
    """{cell id: what the cell printed and displayed, as text or HTML}."""
    found = {}
    for cell in nb.cells:
        parts = []
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            parts.append(output.get("text") or data.get("text/html") or data.get("text/plain") or "")
        found[cell.id] = "\n".join(parts)
    return found


@pytest.mark.slow
def test_runs_from_top_to_bottom(run, tmp_path):
    """In colab/, where Jupyter starts it. nbclient raises when a cell fails, so every assertion held."""
    nb = run(notebook(), NOTEBOOK.parent)
    code = [cell for cell in nb.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))

    shown = texts(nb)
    assert "clip_surrogate" in shown["objective"]
    assert "by hand" in shown["hand"]
    assert "Sampler and learner agree to 1e-4 in float32." in shown["proof"]
    assert "with a carry" not in shown["failures"]  # tiny.yaml has another task than sums

    # What the notebook measures is what the run measured, before and after training.
    (path,) = tmp_path.glob("jaxrl-*/run/metrics.jsonl")
    metrics = [json.loads(line) for line in path.read_text().splitlines()]
    before, after = (f"{row['eval/vowel/greedy_accuracy']:.1%}" for row in (metrics[0], metrics[-1]))
    assert f"right = {before}," in shown["before-accuracy"]
    assert f"right = {after}," in shown["after"] and f"metrics.jsonl says {after}" in shown["after"]
    assert (path.parent / "report.html").is_file()

    # The figures hold the run's numbers.
    for name, curves in (("accuracy-curve", 5), ("training-curves", 6), ("time-split", 5)):
        cell = next(cell for cell in nb.cells if cell.id == name)
        figures = [o.data[PLOTLY] for o in cell.outputs if PLOTLY in o.get("data", {})]
        assert len(figures) == 1 and len(figures[0]["data"]) == curves
        assert all(len(trace["x"]) for trace in figures[0]["data"])


def test_starts_in_the_repository_root(run):
    """The project is found, and nothing is installed."""
    shown = texts(run(notebook(last="config"), ROOT))
    assert "installing" not in shown["setup"] and "JAX" in shown["setup"]
    assert "task: {name: vowel}" in shown["config"]


def test_says_what_to_do_without_a_project_folder(run, tmp_path):
    """On Colab with SOURCE left empty."""
    folder = tmp_path / "somewhere" / "else"
    folder.mkdir(parents=True)
    with pytest.raises(CellExecutionError, match="Set SOURCE to the git URL of the project"):
        run(notebook(last="setup"), folder)


@pytest.mark.parametrize("path", sorted((ROOT / "colab").glob("*.ipynb")), ids=lambda path: path.name)
def test_is_committed_clean(path):
    """No outputs, no counts, no paths or settings of the machine that it was written on."""
    nb = json.loads(path.read_text(encoding="utf-8"))
    nbformat.validate(nbformat.from_dict(nb))
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None, cell["id"]
        assert cell["metadata"] == {}, cell["id"]
    assert nb["metadata"]["kernelspec"]["name"] == "python3"
    assert set(nb["metadata"]["language_info"]) == {"name"}
    source = "".join(line for cell in nb["cells"] for line in cell["source"])
    assert not re.search(r"(?<![\w.])/(home|root|work|tmp|Users|mnt|usr|opt|content)/|[A-Z]:\\", source)
