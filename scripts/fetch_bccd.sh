#!/usr/bin/env bash
# Fetch the blood-cell data set BCCD (MIT licence), which the guide and some tests read, and check every byte of it.
#   scripts/fetch_bccd.sh [DIR]
# DIR (BCCD_Dataset unless given) then has BCCD/Annotations, BCCD/ImageSets and BCCD/JPEGImages: 732 files, 7.5 MB. What
# is there already is checked, never changed. Ends with 1 if the data are other data, with 3 if they cannot be fetched.
# BCCD_SOURCE and BCCD_COMMIT name another copy of the git repository, as on a mirror.
set -euo pipefail
export LC_ALL=C GIT_TERMINAL_PROMPT=0

source=${BCCD_SOURCE:-https://github.com/Shenggan/BCCD_Dataset}
commit=${BCCD_COMMIT:-d272fb14cdff6e473fafeeeba32aba5f560e9e43}
# Of the list of the files' SHA-256 and paths, in the order of the paths.
expected=debd2d76b13c300a3999f96a08cbe9ada5f231c3f882f9877a65a01a695872d1

[ $# -le 1 ] || { echo "usage: $0 [DIR]" >&2; exit 2; }
target=${1:-BCCD_Dataset}

check() {
    local found
    found=$(cd "$1/BCCD" && find Annotations ImageSets JPEGImages -type f -print0 | sort -z |
        xargs -0 -r sha256sum | sha256sum | cut -d' ' -f1) || return 1
    [ "$found" = "$expected" ]
}

if [ ! -e "$target" ]; then
    mkdir -p "$(dirname "$target")"
    fresh=$(mktemp -d "$target.XXXXXX")
    trap 'rm -rf "$fresh"' EXIT
    chmod 755 "$fresh"
    git init --quiet "$fresh"
    if ! { git -C "$fresh" fetch --quiet --depth 1 "$source" "$commit" &&
        git -C "$fresh" -c core.autocrlf=false -c advice.detachedHead=false checkout --quiet FETCH_HEAD; }; then
        echo "$0: $source cannot be fetched; with no way to it, copy the data set from elsewhere to $target" >&2
        exit 3
    fi
    if ! check "$fresh"; then
        echo "$0: what $source gives is not the data set that is expected; nothing was kept" >&2
        exit 1
    fi
    mv -T "$fresh" "$target" 2>/dev/null || true  # another run may have been quicker: its result is checked below
fi
if ! check "$target"; then
    echo "$0: $target/BCCD is not the data set that is expected; remove $target to fetch it anew" >&2
    exit 1
fi
echo "$target/BCCD: 732 files, as expected"
