"""The workload `audio:FOLDER`: uploads the user's audio files to a transcription endpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from loadgen.workloads.datasets import repeated
from loadgen.workloads.recordings import AUDIO_TYPES, RecordedFile, recorded_file
from loadgen.workloads.request import Request
from loadgen.workloads.spec_syntax import WorkloadError

if TYPE_CHECKING:
    from loadgen.workloads.workload import Prompts

FILES_LIMIT = 100_000


class Recordings(msgspec.Struct, frozen=True):
    """A workload that uploads the audio files of a folder in the order of their names, or a single audio file."""

    path: Path

    def samples(self) -> Iterator[RecordedFile]:
        """Yield the recordings. Raises WorkloadError for a file that cannot be read, and for a folder without audio."""
        if not self.path.is_dir():
            yield recorded_file(self.path)
            return
        try:
            paths = sorted(path for path in self.path.iterdir() if path.suffix.lower() in AUDIO_TYPES)
        except OSError as error:
            raise WorkloadError(f"cannot read {self.path}: {error.strerror}") from None
        if not paths or len(paths) > FILES_LIMIT:
            found = f"{len(paths):,} audio files" if paths else "no audio file"
            raise WorkloadError(
                f"the folder {self.path} has {found}",
                f"name a folder with 1 to {FILES_LIMIT:,} files whose names end in {', '.join(AUDIO_TYPES)}",
            )
        yield from map(recorded_file, paths)

    def requests(self, prompts: Prompts) -> Iterator[Request]:
        """Yield one request per recording, with the ids 0, 1, 2, ...

        Raises WorkloadError for a file that cannot be read, and for a folder without audio files.
        """
        for number, recording in enumerate(repeated(self.samples, repeat=prompts.spec.repeat_file)):
            yield Request(number, "", 0, 0, recording=recording)

    @property
    def description(self) -> str:
        """A description of the workload, for the output of a run."""
        return "audio files"

    def __str__(self) -> str:
        return f"audio:{self.path}"
