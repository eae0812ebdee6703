#!/usr/bin/env bash
# Installs the package into .venv, with the system packages it needs, on Debian 12 or newer and Ubuntu 24.04 or newer.
#   scripts/install.sh [demo]   what a user needs: FUSE, a virtual environment, the package
#   scripts/install.sh test     and what the tests need: Ceph, Chromium, peers to compare with, compilers, linters
# Quick when there is nothing to do. Uses root or sudo for system packages; without either it names what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
extra=${1:-demo}

say() { printf '\033[1m== %s\033[0m\n' "$*"; }
fail() { printf 'install: %s\n' "$*" >&2; exit 1; }
have() { PATH="$PATH:/usr/sbin:/sbin" command -v "$1" >/dev/null 2>&1; }
as_root() {
  if [ "$(id -u)" = 0 ]; then "$@"
  elif have sudo; then sudo "$@"
  else return 1; fi
}

# A package is needed when the thing we use of it is not there, however it came.
missing=()
need() { local package=$1; shift; "$@" >/dev/null 2>&1 || missing+=("$package"); }
library() { PATH="$PATH:/usr/sbin:/sbin" ldconfig -p | grep -q "$1"; }
python_with_venv() {
  local candidate
  for candidate in python3 python3.13 python3.12 python3.11; do
    have "$candidate" && "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
      && { command -v "$candidate"; return 0; }
  done
  return 1
}

python_headers() { "$(python_with_venv)" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h")))'; }

need fuse3 have fusermount3
need python3-venv python_with_venv
if [ "$extra" = test ]; then
  need libcurl4 library libcurl.so.4  # mongod is linked with it
  need libfuse3-dev test -e /usr/include/fuse3/fuse.h  # pyfuse3 comes as source only
  need pkg-config have pkg-config
  need gcc have gcc
  need python3-dev python_headers
  need ceph-common have ceph
  need ceph-mon have ceph-mon
  need ceph-osd have ceph-osd
  need radosgw have radosgw
  need s3fs have s3fs
  need strace have strace
  need ffmpeg have ffmpeg  # frames of videos are compared with its
  need iproute2 have tc  # nodes of a cluster in the tests are network namespaces
  need faketime have faketime
  need e2fsprogs have mkfs.ext4  # a disk that fails in the tests is ext4 on a loop device
  need mount have losetup
  if grep -qx 'ID=debian' /etc/os-release; then  # Ubuntu has a snap alone, which no container runs: those tests skip
    need chromium have chromium
    need chromium-driver have chromedriver
  fi
fi
if [ ${#missing[@]} -gt 0 ]; then
  say "system packages: ${missing[*]}"
  have apt-get || fail "no apt-get here; install these yourself: ${missing[*]}"
  as_root true || fail "neither root nor sudo; ask for these packages: ${missing[*]}"
  as_root apt-get update -q || echo "apt-get update failed; going on with the lists that are there"
  as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}" \
    || fail "could not install: ${missing[*]}"
fi

if ! [ -e /dev/fuse ]; then
  say "/dev/fuse"
  as_root sh -c 'modprobe fuse 2>/dev/null; test -e /dev/fuse || mknod -m 666 /dev/fuse c 10 229' \
    || echo "there is no /dev/fuse and it could not be made: mounts will not work here"
fi
if [ -e /dev/fuse ] && [ "$(stat -c %a /dev/fuse)" != 666 ]; then
  # What udev does on every Debian and Ubuntu; in a container without udev nobody did.
  as_root chmod 666 /dev/fuse || echo "/dev/fuse cannot be opened by every user: mounts will not work for all"
fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  python=$(python_with_venv) || fail "no Python 3.11 or newer with venv"
  say "virtual environment: $("$python" --version) in .venv"
  rm -rf .venv
  "$python" -m venv .venv
fi
stamp=.venv/.installed-$extra
wanted=$(cksum < pyproject.toml; pwd)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  say "Python packages into .venv"
  echo "some minutes the first time; a line for each package"
  # Half of what the tests need is never imported, and a run compiles the rest. `compat`: a line with this folder on the
  # path, where a finder of setuptools' own takes 25 ms of each start of Python.
  .venv/bin/python -m pip --disable-pip-version-check install --progress-bar off -e ".[$extra]" \
    --config-settings editable_mode=compat \
    $([ "$extra" != test ] || echo --no-compile) \
    | { grep --line-buffered -E '^(Collecting|Building|Installing|Successfully)' || true; } | cut -c -120
  printf '%s\n' "$wanted" > "$stamp"
fi
