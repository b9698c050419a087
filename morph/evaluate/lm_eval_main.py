"""lm-eval's command line with `--model morph`, and the project's task files by their names.

python -m morph.evaluate.lm_eval_main --model morph --model_args pretrained=smollm2-135m --tasks arc_easy
"""

from __future__ import annotations

import sys

from lm_eval.__main__ import cli_evaluate

from morph.evaluate.lm_eval_tasks import TASKS  # registers the model


def main() -> None:
    """Run lm-eval; its own arguments."""
    words = sys.argv[1:]
    runs = not words or words[0] not in ("ls", "validate")
    if runs and not any(word.startswith("--include_path") for word in words):
        sys.argv += ["--include_path", str(TASKS)]
    cli_evaluate()


if __name__ == "__main__":
    main()
