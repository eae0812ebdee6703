#!/usr/bin/env bash
# Everything that must hold, on a bare Debian 12+ or Ubuntu 24.04+ machine: installs, checks the code, runs the tests.
#   scripts/test.sh [--fast] [PYTEST ARGUMENT]...
# --fast leaves out tests marked slow and those that start Ceph. The second run installs nothing.
set -euo pipefail
cd "$(dirname "$0")/.."
fast=""
if [ "${1:-}" = --fast ]; then
  fast="not slow and not ceph and "
  shift
fi

scripts/install.sh test
run() { printf '\033[1m== %s\033[0m\n' "$*"; ".venv/bin/$1" "${@:2}"; }
run ruff format --check .
run ruff check .
run mypy
run lint-imports --no-logo
run python scripts/check_package.py
NO_MKDOCS_2_WARNING=1 run mkdocs build --strict --quiet
# Four at a time, as tests wait for servers and processes more than they compute; then those that want to be alone.
# 5 says that the arguments name none of these.
run pytest -q -n 4 --dist worksteal -m "${fast}not alone" "$@" || [ $? = 5 ]
run pytest -q -m "${fast}alone" "$@" || [ $? = 5 ]
