# Virtual environments for tools/demo and tools/test; to be sourced, with $repo set.

# Python compiles what is used when it is first used, not all 10,000 files of PyTorch at once.
install=(-m pip install --quiet --disable-pip-version-check --no-compile)
unset PYTHONDONTWRITEBYTECODE

# say TEXT...: one line of progress.
say() { printf '== %s\n' "$*"; }

# quietly LOG COMMAND...: run it, its output kept in LOG and shown only when it fails.
quietly() {
    local log=$1
    shift
    if ! "$@" >"$log" 2>&1; then
        tail -n 25 "$log" >&2
        printf 'failed: %s (all of its output: %s)\n' "$*" "$log" >&2
        return 1
    fi
}

# find_python: print the first Python >= 3.10, or say what is needed.
find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11 python3.10; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
    echo "pdmpi needs Python 3.10 or newer; install it, or set PYTHON to its path" >&2
    return 1
}

# new_venv DIR: make an empty environment with pip in it.
new_venv() {
    local python
    python=$(find_python) || return 1
    if ! "$python" -m venv --clear "$1" >"$1.log" 2>&1; then
        cat "$1.log" >&2
        echo "python3 -m venv failed; on Debian or Ubuntu: apt-get install python3-venv" >&2
        return 1
    fi
    rm -f "$1.log"
}

# fresh DIR WANTED: whether DIR was installed from the same requirements already.
fresh() { [ -x "$1/bin/python" ] && [ "$(cat "$1/.installed" 2>/dev/null)" = "$2" ]; }

# wanted EXTRA: what an environment depends on, as one line.
wanted() { printf '%s %s' "$1" "$(cat "$repo/pyproject.toml" "$repo/constraints.txt" | cksum)"; }

# install_torch DIR: PyTorch without CUDA where there is such a build.
install_torch() {
    local pip=("$1/bin/python" "${install[@]}" -c "$repo/constraints.txt")
    local version
    version=$(sed -n 's/^torch==//p' "$repo/constraints.txt")
    "${pip[@]}" "torch==$version+cpu" || {
        [ "$(uname -s)" = Linux ] &&
            "${pip[@]}" --retries 1 --timeout 20 --extra-index-url https://download.pytorch.org/whl/cpu \
                "torch==$version+cpu"
    } || "${pip[@]}" "torch==$version"
}

# make_venv DIR EXTRA: the package, editable, with one of its extras.
make_venv() {
    local want
    want=$(wanted "$2")
    fresh "$1" "$want" && return
    say "installing into $(basename "$1") (PyTorch, MPI and the rest; a few minutes the first time)"
    new_venv "$1" || return 1
    quietly "$1/install.log" install_torch "$1" || return 1
    quietly "$1/install.log" "$1/bin/python" "${install[@]}" \
        -c "$repo/constraints.txt" -e "$repo[$2]" || return 1
    printf '%s' "$want" >"$1/.installed"
}

# make_mpich_venv DIR BASE: mpi4py over MPICH, everything else from the environment BASE.
make_mpich_venv() {
    local want
    want=$(wanted "mpich $2")
    fresh "$1" "$want" && return
    say "installing MPICH into $(basename "$1")"
    new_venv "$1" || return 1
    quietly "$1/install.log" "$1/bin/python" "${install[@]}" \
        -c "$repo/constraints.txt" mpi4py mpich || return 1
    "$1/bin/python" - "$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" <<'PY' || return 1
import pathlib, sys, sysconfig
own = pathlib.Path(sysconfig.get_path("purelib"))
(own / "base.pth").write_text(f"import site; site.addsitedir({sys.argv[1]!r})\n")
PY
    printf '%s' "$want" >"$1/.installed"
}
