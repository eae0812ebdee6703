#!/usr/bin/env bash
# From a fresh checkout to a mounted snapshot: installs the package into .venv, with FUSE, and runs the demo.
#   scripts/quickstart.sh [OPTION OF dsctl demo]...
# Needs no server and no account; the demo cleans up after itself.
set -euo pipefail
cd "$(dirname "$0")/.."

scripts/install.sh demo
.venv/bin/dsctl demo "$@"
cat <<'NEXT'

dsctl is in .venv/bin:  . .venv/bin/activate
  dsctl warm NAME@v1 --wait     fetch all of a snapshot now
  dsctl ui                      data sets and their images in a browser
  dsctl doctor                  when something does not work
NEXT
