"""Tests the defects that ``python -m tests.mutation`` puts into files."""

from pathlib import Path

from tests.mutation.__main__ import FOLDERS, ROOT, copied, related, sources
from tests.mutation.mutants import mutants

SOURCE = '''"""A docstring: 1 + 1."""

def total(values: list[int] = [1], *, twice: bool = False) -> int:
    found = 0
    for value in values:
        if value is not None and not value < 0:
            found += value % 7
    print(f"{found + 1}")
    if len(values) > 3:
        raise ValueError("more than " + "3")
    return found * 2 if twice else found
'''


def test_each_kind_of_defect_is_made():
    assert [(mutant.line, mutant.what) for mutant in mutants(SOURCE)] == [
        (3, "1 becomes 2"),
        (3, "False becomes True"),
        (4, "0 becomes 1"),
        (6, "value is not None and not value < 0 becomes (not (value is not None and not value < 0))"),
        (6, "is not becomes is"),
        (6, "and becomes or"),
        (6, "not value < 0 becomes (value < 0)"),
        (6, "< becomes <="),
        (6, "0 becomes 1"),
        (7, "found += value % 7 becomes pass"),
        (7, "% becomes *"),
        (7, "7 becomes 8"),
        (8, 'print(f"{found + 1}") becomes pass'),
        (9, "len(values) > 3 becomes (not (len(values) > 3))"),
        (9, "> becomes >="),
        (9, "3 becomes 4"),
        (11, "* becomes +"),
        (11, "2 becomes 3"),
        (11, "twice becomes (not (twice))"),
    ]


def test_a_defect_changes_what_the_code_returns():
    results = set()
    for text in (SOURCE, *(mutant.applied(SOURCE) for mutant in mutants(SOURCE) if mutant.line in (4, 7, 11))):
        scope = {}
        exec(text, scope)
        results.add(scope["total"]([5, 9], twice=True))
    assert len(results) > 5


def test_every_file_has_tests_that_exist():
    # The files are listed here, because reading them for defects would take a second of every process's collection.
    paths = sources(ROOT, FOLDERS)
    assert len(paths) > 50
    for path in paths:
        found = related(ROOT, path)
        assert found, path
        assert all(Path(ROOT, test).exists() for test in found), path


def test_a_file_belongs_to_the_first_row_that_fits():
    kernel = related(ROOT, Path("kernels/norm_act.py"))
    # The tests of the modules see that a kernel counts the batches.
    assert {"tests/kernels/test_norm_act.py", "tests/nn/test_inplace_abn.py"} <= set(kernel)
    assert "tests/kernels/test_norm_act.py" not in related(ROOT, Path("kernels/max_pool.py"))


def test_a_copy_has_the_package_and_its_kernels(tmp_path):
    """The runner once linked kernels over a folder that the package has by now."""
    folder = copied(ROOT, tmp_path)
    assert (folder / "fusedseg/kernels/__init__.py").exists()
    assert (folder / "kernels/norm_act_bwd.py").exists()
