#!/usr/bin/env bash
# Everything that must hold, on a bare Debian 12+ or Ubuntu 24.04+ machine: installs, checks the code, runs the tests.
#   scripts/test.sh [--fast | --long] [PYTEST ARGUMENT]...
# --fast leaves out tests marked slow and those that start Ceph; --long has the largest benchmarks run, too. The second
# run installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
which="not long and "
case "${1:-}" in
  --fast) which+="not slow and not ceph and " && shift ;;
  --long) which="" && shift ;;
esac

scripts/install.sh test
unset PYTHONDONTWRITEBYTECODE  # what many processes import is compiled once
say() { printf '\033[1m== %s\033[0m\n' "$*"; }
run() { say "$@"; ".venv/bin/$1" "${@:2}"; }
# Types beside the rest: each takes a processor. Its output comes whole, after theirs.
types=$(mktemp)
.venv/bin/mypy >"$types" 2>&1 &
mypy=$!
# So is what tests import compiled, once: else each of the processes that run them does it, at the same time.
.venv/bin/pytest -q --collect-only -p no:cacheprovider "$@" >/dev/null 2>&1 &
compiling=$!
trap 'rm -f "$types"; kill "$mypy" "$compiling" 2>/dev/null || true' EXIT
run ruff format --check .
run ruff check .
run lint-imports --no-logo
run python scripts/check_package.py
NO_MKDOCS_2_WARNING=1 run mkdocs build --strict --quiet
say mypy
wait "$mypy" || { cat "$types"; exit 1; }
cat "$types"
wait "$compiling" || true  # the tests tell what is wrong

# Run tests. A machine at work can be late by seconds, so up to three that fail are run once more with nothing beside
# them. What passes then is named at the end: it wants mending all the same.
late=()
tests() {
  local status=0 failed
  run pytest -q --cache-clear "$@" || status=$?
  case $status in
    5) return 0 ;; # the arguments name none of these
    1) ;;
    *) return $status ;;
  esac
  mapfile -t failed < <(.venv/bin/python -c 'import json; print(*json.load(open(".pytest_cache/v/cache/lastfailed")), sep="\n")')
  [ ${#failed[@]} -le 3 ] || return 1
  run pytest -q -p no:cacheprovider "${failed[@]}" || return 1
  late+=("${failed[@]}")
}
# Four at a time, as tests wait for servers and processes more than they compute; then those that want to be alone, which
# go by a second's silence of a process: by now all that it imports is compiled.
tests -n 4 --dist worksteal -m "${which}not alone" "$@"
mapfile -t alone < <(grep -rl --include='test_*.py' 'mark\.alone' tests)  # importing all the others takes longer
tests -m "${which}alone" "${@:-${alone[@]}}"
for test in "${late[@]}"; do
  echo "failed once, and passed when nothing ran beside it: $test"
done
