"""A client that streams and then waits to be killed; run as a script: HOST PORT CONNECTIONS HEAD BODY.

Standard library only, so that it is there at once. Prints one line when its first answer has begun to come.
"""

import socket
import sys
import time


def main(host: str, port: str, connections: str, head: str, body: str) -> None:
    """Sends a request on each of several connections and reads only what comes first."""
    request = f"{head}\r\nContent-Length: {len(body.encode())}\r\n\r\n{body}".encode()
    sockets = []
    for _ in range(int(connections)):
        sockets.append(socket.create_connection((host, int(port))))
        sockets[-1].sendall(request)
    got = b""
    while b"data: " not in got:
        new = sockets[0].recv(65536)
        if not new:
            break
        got += new
    print(got.split(b"\r\n")[0].decode("latin-1"), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
