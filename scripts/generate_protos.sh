#!/usr/bin/env bash
# Generates csi_driver/wire/*_pb2.py and .pyi from the .proto files there. Needs the packages of scripts/install.sh test.
set -euo pipefail
cd "$(dirname "$0")/.."
.venv/bin/python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. csi_driver/wire/*.proto
