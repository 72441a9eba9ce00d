"""The program with a training that waits for a signal after 25 steps, so that none comes too early or too late.

It tells so by a file ``held-PID`` in the folder $HOLD. A file ``go`` there lets it go on: several processes stop after
their next step, once one of them was signalled. With $TWICE, a second SIGTERM comes while the checkpoint is written.
"""

import os
import signal
import time
from pathlib import Path
from typing import Any

from anabranch.cli import main
from anabranch.train import trainer

STEP = 25
step, save = trainer.Trainer.step, trainer.save_checkpoint


def held(self: trainer.Trainer, *arguments: Any) -> Any:
    folder = Path(os.environ["HOLD"])
    if self.done == STEP:
        (folder / f"held-{os.getpid()}").touch()
        while not (folder / "go").exists():
            time.sleep(0.01)
    return step(self, *arguments)


def saved(*arguments: Any) -> None:
    if "TWICE" in os.environ:
        signal.raise_signal(signal.SIGTERM)
    save(*arguments)


trainer.Trainer.step, trainer.save_checkpoint = held, saved  # type: ignore[method-assign]
if __name__ == "__main__":
    main()
