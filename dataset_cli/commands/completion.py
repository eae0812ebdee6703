"""`dsctl completion SHELL`: prints the script that makes a shell complete commands, options, datasets and
references.

The scripts call `dsctl` with `_DSCTL_COMPLETE` set, which click answers. Ours for bash differs from click's
because bash cuts words at '@', in the middle of a reference.
"""

from __future__ import annotations

import click

from dataset_cli.app import App, command

_VARIABLE = "_DSCTL_COMPLETE"
_BASH = """\
_dsctl_completion() {
    local line="${COMP_LINE:0:COMP_POINT}" words current prefix="" response item type value
    read -r -a words <<< "$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    current="${words[${#words[@]}-1]}"
    # bash replaces only what follows the last '@' of a word
    [[ $COMP_WORDBREAKS == *@* && $current == *@* ]] && prefix="${current%@*}@"
    response=$(COMP_WORDS="${words[*]}" COMP_CWORD=$((${#words[@]}-1)) \\
        _DSCTL_COMPLETE=bash_complete "${words[0]}")
    COMPREPLY=()
    while IFS= read -r item; do
        type="${item%%,*}" value="${item#*,}"
        case "$type" in
            dir) compopt -o dirnames ;;
            file) compopt -o default ;;
            plain) COMPREPLY+=("${value#"$prefix"}") ;;
        esac
    done <<< "$response"
}
complete -o nosort -F _dsctl_completion dsctl
"""


@command(has_json=False)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(app: App, shell: str) -> None:
    """Print the completion script of a shell.

    \b
    bash   eval "$(dsctl completion bash)"             in ~/.bashrc
    zsh    eval "$(dsctl completion zsh)"              in ~/.zshrc, after compinit
    fish   dsctl completion fish > ~/.config/fish/completions/dsctl.fish
    """
    from click.shell_completion import get_completion_class

    from dataset_cli.main import cli

    if shell == "bash":
        app.out.line(_BASH.rstrip())
        return
    kind = get_completion_class(shell)
    assert kind is not None
    app.out.line(kind(cli, {}, "dsctl", _VARIABLE).source().rstrip())
