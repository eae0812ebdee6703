"""`dsctl`: what users type.

`main` is the entry point with the table of commands and of exit codes, `app` what a command is given,
`output` how results are shown, `completion` the shells' part, and `commands/` has one file a command. A
module of this package may import only click, the standard library and `datacache.core.errors` at its top:
`dsctl --help` and completion read them all and must be quick.
"""
