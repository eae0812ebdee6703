"""`dsctl`: what users type.

`main` is the entry point with the table of commands and of exit codes, `app` what commands are made with and given,
`output` how results are shown, and `commands/` has the commands. `dsctl --help` and completion read them all and must
be quick: a module of this package may import only click, the standard library, `datacache.core`, `datacache.settings`
and the fronts (`datacache.api`, `fuse_mount`) at its top.
"""
