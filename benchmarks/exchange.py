"""The exchange alone: blocks from memory through a Unix socket, one by one and in batches, from one process to another.

Nothing is fetched, stored or checked. CPU time is that of each process a block; both share the machine.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Generator
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness import OBJECT_BYTES, ResultTable, benchmark, rounds_of
from benchmarks.usage import cpu_of_families
from datacache.core import ipc
from datacache.core.ids import ObjectRef
from datacache.exchange.client import Connection
from datacache.exchange.frames import Frame, Kind
from datacache.exchange.server import Answer, FrameServer
from datacache.exchange.wire import BlocksRequest, Mode


class Exchanged(NamedTuple):
    """One way to ask: blocks a second, and CPU µs a block of server and client."""

    rate: float
    server_us: float
    client_us: float


def main() -> None:
    with benchmark(__doc__, blocks=(20_000, 64), size=OBJECT_BYTES, rounds=(3, 1)) as (args, work):
        folder = work.short_folder()
        sockets = [folder / str(number) for number in range(2)]
        servers = [get_context("fork").Process(target=_serve, args=(path, args.size), daemon=True) for path in sockets]
        for server in servers:
            server.start()
        pids = [server.pid for server in servers if server.pid is not None]
        ways = [(batch, connections, 1) for batch in (1, 16) for connections in (1, 4)] + [(16, 4, 2)]
        named = {
            f"batches of {way[0]}, {way[1]} connections" + (f" to {way[2]} processes" if way[2] > 1 else ""): way
            for way in ways
        }

        def ask(batch: int, connections: int, processes: int) -> Exchanged:
            refs = [ObjectRef("s3://images", f"{n:07d}.jpg", args.size, "0" * 32) for n in range(batch)]
            request = BlocksRequest([(ref, 0) for ref in refs], "images", "", Mode.READ)
            times = max(1, args.blocks // batch // connections)

            def one(number: int) -> None:
                connection = Connection(_connected(sockets[number % processes]), look=lambda: None, look_every_s=1.0)
                for _ in range(times):
                    for _ in connection.blocks(request):
                        pass
                connection.close()

            threads = [threading.Thread(target=one, args=(number,)) for number in range(connections)]
            theirs, ours, begun = cpu_of_families(pids), time.process_time(), time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            seconds, count = time.perf_counter() - begun, times * batch * connections
            server_us = 1e6 * (cpu_of_families(pids) - theirs) / count
            return Exchanged(count / seconds, server_us, 1e6 * (time.process_time() - ours) / count)

        found = rounds_of({name: lambda way=way: ask(*way) for name, way in named.items()}, args.rounds)
        for server in servers:
            server.kill()
        table = ResultTable(f"blocks of {args.size:,} bytes from memory", "", "blocks/s", "server µs", "client µs")
        for name, rounds in found.items():
            table.row(name, *max(rounds))
        table.print()


def _serve(path: Path, size: int) -> None:
    body = bytes(size)

    def answer(frame: Frame) -> Generator[Answer, None, None]:
        for _ in BlocksRequest.decode(frame.body).blocks:
            yield Answer(Kind.OK, body=body)

    FrameServer(answer, most_bytes=2**20).listen(ipc.listen(path, backlog=64))
    threading.Event().wait()


def _connected(path: Path) -> socket.socket:
    while True:
        try:
            return ipc.connect(path)
        except FileNotFoundError:
            time.sleep(0.01)


if __name__ == "__main__":
    main()
