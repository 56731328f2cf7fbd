"""Says the flags of `penstock serve` where an error names the options that they set."""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping


def flags_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """The flag that sets each option, by the option's name, such as "--max-num-seqs" by "max_num_seqs"."""
    return {action.dest: action.option_strings[0] for action in parser._actions if action.option_strings}


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """The message of a ConfigError as it is told on the command line: with `flags` in place of options.

    An error names options by their fields, because a program that embeds the engine sets those. A name with
    an underscore is replaced wherever it stands, unless it is part of a path or of a file's name, or is
    quoted as somebody's value. Other names, such as `port` and `dtype`, are words, too, and fields of
    config.json. They are replaced where they begin a problem ("port: must be from 0 to 65535"), if the whole
    message begins with an option.
    """
    names = "|".join(name for name in flags if "_" in name)
    option = rf"(?<![\w/.\-'\"])(?:{names})(?![\w/\-'\"]|\.\w)"
    if message.partition(": ")[0] in flags:
        option += rf"|(?:^|(?<=; ))(?:{'|'.join(flags)})(?=: )"
    return re.sub(option, lambda match: flags[match[0]], message)
