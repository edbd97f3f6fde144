"""An average over all ranks through a lossy codec, with error feedback: each loss is added to the next average."""

from __future__ import annotations

import torch

from .group import Group
from .packets import Codec, Packets
from .tag import Tag
from .work import Work


class FeedbackAverage:
    """Averages tensors of ``numel`` elements over the N ranks of ``group`` with error feedback (arXiv 2102.02888,
    section 4.3).

    Every rank is a worker and a server. As a worker it adds the encoding error of its last messages to its tensor and
    sends slice r of the sum, encoded by ``codec``, to rank r. As a server it averages the slices that it receives, adds
    the encoding error of its last answer, and sends the result, encoded, to all. So every loss enters a later average,
    and even one bit per element converges. ``device``: of the tensors.

    Attributes:
        worker_error: encoding error of this rank's last messages, float32 of N*s elements (s: see `slice_numel`).
        server_error: encoding error of this rank's last answer, float32 of s elements.
    """

    def __init__(self, group: Group, codec: Codec, numel: int, device: torch.device) -> None:
        self._group = group
        self._numel = numel
        self._slice = self.slice_numel(numel, group.world_size)
        self._owned = min(max(numel - group.rank * self._slice, 0), self._slice)
        self._packets = Packets(codec, self._slice)
        self.worker_error = torch.zeros(group.world_size * self._slice, device=device)
        self.server_error = torch.zeros(self._slice, device=device)

    @staticmethod
    def slice_numel(numel: int, world_size: int) -> int:
        """Return s, the number of elements that a rank averages as a server: ``numel`` / ``world_size``, rounded up."""
        return -(-numel // world_size)

    def average(self, x: torch.Tensor, tag: Tag) -> Work:
        """Start to replace ``x`` (float32, ``numel`` elements, contiguous) by the average of all ranks' ``x`` through
        the codec; `Work.wait` on the result writes ``x``. ``tag`` names the collective.

        The bits are the same on every rank; on a single rank ``x`` stays as it is. Collective, and `Work.wait` too: it
        sends the answers over the group, so every rank must wait at the same point among the group's collectives.
        Changes both errors: start an average when the one before was waited for. Sends 2 (N-1) packets of s elements (N
        ranks; s: see `slice_numel`). Raises ValueError when ``x`` has another number of elements.
        """
        if x.numel() != self._numel:
            raise ValueError(f"{tag}: expected {self._numel} elements, as at the first average, got {x.numel()}")
        ranks = self._group.world_size
        if ranks == 1 or self._numel == 0:
            return Work(tag)
        self.worker_error[: self._numel].add_(x)
        sent = self._packets.empty(ranks, x.device)
        slices = self.worker_error.view(ranks, -1)
        for rank in self._group.coded_ranks(x.device):
            self._encode(slices[rank], sent[rank])
        self.worker_error[self._numel :].zero_()
        arrived = torch.empty_like(sent)
        first = self._group.all_to_all(arrived, sent, tag)

        def finish() -> None:
            """Wait for the other ranks' slices, exchange the averages, and write them into ``x``; `Work.wait` calls
            it."""
            first.wait()
            self._exchange_averages(arrived, x, tag)

        return Work(tag, buffers=(x, sent, arrived), finish=finish)

    def _exchange_averages(self, arrived: torch.Tensor, x: torch.Tensor, tag: Tag) -> None:
        """Average this rank's slice of all ranks, all-gather the ranks' averages, and write them into ``x``; waits.
        Collective. ``arrived``: the packets that the ranks sent to this one, one row per rank. ``tag``: names the
        gather. Changes `server_error`."""
        decoded, total = torch.empty_like(self.server_error), torch.zeros_like(self.server_error)
        coded = self._group.coded_ranks(x.device)
        for rank in coded:
            self._packets.read(arrived[rank], decoded)
            total.add_(decoded)
        self.server_error.add_(total.div_(len(arrived)))
        answers = torch.empty_like(arrived)
        self._encode(self.server_error, answers[self._group.rank])
        self.server_error[self._owned :].zero_()
        self._group.all_gather(answers.view(-1), answers[self._group.rank], tag).wait()
        for rank in coded:
            target = x[rank * self._slice : (rank + 1) * self._slice]
            if target.numel():
                self._packets.read(answers[rank], decoded)
                target.copy_(decoded[: target.numel()])

    def _encode(self, compensated: torch.Tensor, packet: torch.Tensor) -> None:
        """Encode ``compensated`` (one slice of s elements, the last encoding error included) into ``packet`` (uint8),
        and replace ``compensated`` by the new encoding error."""
        self._packets.write(compensated, packet)
        decoded = torch.empty_like(compensated)
        self._packets.read(packet, decoded)
        compensated.sub_(decoded)
