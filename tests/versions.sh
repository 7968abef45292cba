#!/usr/bin/env bash
# Runs the core of the tests under several versions of PyTorch, each in a virtual environment of its own that is removed
# afterwards, and prints a table.
#
#     tests/versions.sh                         # the versions below
#     tests/versions.sh 2.8.0 2.15.0            # these
#     PYTHON=python3.12 tests/versions.sh       # with another Python
#
# pip brings the Triton that each version asks for.  A build with CUDA needs about 6 GB of disk, and most of the time of
# this script is its download; the tests take ten to twenty minutes on two cores.  KEEP=1 keeps the environments.
# TESTS overrides the folders and files that are run, and PYTEST_ARGS is passed to pytest.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
unset FUSEDSEG_BACKEND TRITON_INTERPRET

versions=("$@")
[ $# -gt 0 ] || versions=(2.8.0 2.10.0 2.11.0 2.13.0 2.15.0)
core=${TESTS:-tests/ops tests/nn tests/conversion tests/training tests/losses tests/test_activation.py tests/test_import.py tests/test_private.py tests/test_doctor.py}
work=$(mktemp -d)
table=$work/table
trap '[ -n "${KEEP:-}" ] || rm -rf "$work"' EXIT

one() { # VERSION: prints a line of the table
    local env=$work/$1 log=$work/$1.txt python
    "${PYTHON:-python3}" -m venv "$env" || return
    python=$env/bin/python
    if ! "$python" -m pip install --quiet --upgrade "setuptools>=77" > "$log" 2>&1 \
        || ! "$python" -m pip install --quiet "torch==$1" > "$log" 2>&1 \
        || ! "$python" -m pip install --quiet --no-build-isolation -e ".[test]" > "$log" 2>&1; then
        echo "$1: not installed: $(grep -m 1 ERROR "$log")"
        return
    fi
    # shellcheck disable=SC2086
    "$python" -m pytest -q -p no:cacheprovider $core ${PYTEST_ARGS:-} > "$log" 2>&1
    grep -E "^(FAILED|ERROR)" "$log" >&2
    echo "$("$python" -W ignore -c '
import platform, torch
try:
    import triton
    name = triton.__version__
except ImportError:
    name = "none"
print(f"torch {torch.__version__}, triton {name}, Python {platform.python_version()}")'): $(tail -n 1 "$log")"
}

for version in "${versions[@]}"; do
    one "$version" | tee -a "$table"
    [ -n "${KEEP:-}" ] || rm -rf "${work:?}/$version"
done
echo
cat "$table"
# each line must say that tests passed, and none that one failed
! grep -vE "[0-9]+ passed" "$table" && ! grep -qE "[0-9]+ (failed|error)" "$table"
