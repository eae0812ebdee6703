"""`python -m dataset_cli` is `dsctl`."""

from __future__ import annotations

from dataset_cli.main import main

main()
