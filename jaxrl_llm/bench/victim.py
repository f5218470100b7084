"""A client that streams and then waits to be killed; run as a script: HOST PORT CONNECTIONS HEAD BODY.

Standard library only, so that it is there at once. Prints one line when every answer has begun to come.
"""

import socket
import sys
import time


def main(host: str, port: str, connections: str, head: str, body: str) -> None:
    """Sends a request on each of several connections; reads the head of each answer, and what comes first of one."""
    request = f"{head}\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode()
    sockets = [socket.create_connection((host, int(port))) for _ in range(int(connections))]
    for sock in sockets:
        sock.sendall(request)
    heads = [_read(sock, b"\r\n\r\n") for sock in sockets[1:]]
    heads.append(_read(sockets[0], b"data: "))
    # The highest status, which is the worst.
    print(max(head.split(b"\r\n")[0] for head in heads).decode("latin-1"), flush=True)
    time.sleep(600)


def _read(sock: socket.socket, mark: bytes) -> bytes:
    """What comes up to a mark, or to the end."""
    got = b""
    while mark not in got and (new := sock.recv(65536)):
        got += new
    return got


if __name__ == "__main__":
    main(*sys.argv[1:])
