"""docs/python.md: its blocks run in order as they stand, in a script and in a notebook."""

import re
from pathlib import Path

from tests import warm

PAGE = Path(__file__).parents[2] / "docs" / "python.md"


def blocks():
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def test_the_blocks_run_in_order(tmp_path, model):
    start = f"import matplotlib\nmatplotlib.use('Agg')\nMODEL = {str(model)!r}\n"
    done = warm.run("-c", start + "\n".join(blocks()), directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "stepwise" in done.stdout  # in the name of the run


def test_a_notebook_trains_with_its_own_functions(tmp_path, model):
    """A real kernel: functions of cells reach the workers, the panel is shown below the cell, and so is the plot."""
    import nbclient
    import nbformat

    first, *_ = blocks()
    cells = [f"%cd -q {tmp_path}\nMODEL = {str(model)!r}", first, "result.plot()"]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=240, kernel_name="python3").execute()
    trained, plotted = notebook.cells[1].outputs, notebook.cells[2].outputs
    panel = next(output for output in trained if output.output_type == "display_data")
    assert "step 3/3" in panel.data["text/plain"] and "reward" in panel.data["text/html"]
    assert any("3 runs/digits" in output.get("text", "") for output in trained)
    assert any("image/png" in output.get("data", {}) for output in plotted)
