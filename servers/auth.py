"""What gets one into a server: its resolved address, headers, an API key among them, and how certificates are checked.
And the secrets among them, which no text may hold that is kept or shown."""

from __future__ import annotations

import html
import json
import os
import re
from base64 import b64decode
from collections.abc import Mapping
from contextlib import suppress
from itertools import product
from os.path import commonprefix
from pathlib import Path
from typing import TYPE_CHECKING, Any, AnyStr, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

import msgspec

from loadgen.servers.errors import LocalLimitError, SecretError
from loadgen.workloads.input_files import input_path

if TYPE_CHECKING:
    import ssl

HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+): *([ -~\u00a0-\u00ff]*)")
HIDDEN = "***"
CA_BYTES = 1 << 24
"""Maximum size of a file of certificate authorities; those of an operating system are about 0.2 MB."""
MIN_SECRET_LENGTH = 6
"""Characters of the shortest secret that `hide_secrets` looks for: a shorter one would be found in ordinary words."""
_FRAMING = ("content-length", "transfer-encoding", "connection")
"""Headers that say where a request ends: only who writes it knows."""
_SECRET = re.compile("auth|cookie|credential|key|password|secret|signature|token", re.IGNORECASE)
_VALUE = re.compile(
    r"(?i:bearer|basic) +[^ $]|\b(?:sk|pk|hf|gh[a-z]|xox[a-z])[-_]\w{4}|(?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z])[^\s$]{32}"
)
"""How the values of secrets begin, whatever the header is called."""
_NAMED = re.compile(r"(?i)[\w-]*(?:key|password|secret|token)")
"""Options of servers and variables that hold secrets; `--max-tokens` and `--api-key-env` hold none."""
_CREDENTIALS = re.compile(r"(?:\w+:/*)?([^/@?]*)@|[^?]*\?(.*(?:auth|key|password|secret|sig|token).*)")
_VARIABLE = re.compile(r"(?<!\$)(?:\$\$)*\$[A-Za-z_{]")
_WORD = re.compile(r"[^\s;,=]+(?=[\s;,]|=*$)")
_known: set[str] = set()


class Access(NamedTuple):
    """How to get at a server: never written to the Run."""

    headers: dict[str, str] = {}  # noqa: RUF012 - nobody writes to it
    """What each request carries."""
    tls: ssl.SSLContext | None = None
    """How certificates are checked, if not against the system's: reading those takes 90 ms, of who speaks TLS only."""


NO_AUTH = Access()
"""Of a server that asks for nothing."""


def read_secret(variable: str, environ: Mapping[str, str] = os.environ) -> str:
    """The secret that an environment variable holds, or "". Mounted ones end in a newline. Raises SecretError, which
    does not show it."""
    secret = environ.get(variable, "").strip()
    if not re.fullmatch("[ -~]*", secret):
        what = "line breaks, control characters or letters beyond ASCII"
        raise SecretError(f"{variable}: no key holds {what}", f"Set it to the key alone: export {variable}=...")
    register_secret(secret, of=secret and variable)
    return secret


def bearer_header(key: str | None) -> dict[str, str]:
    """The header of an API key, where there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def register_secret(text: str, *, of: str = "") -> None:
    """Register a secret with `hide_secrets`: the text and each of its words, also as JSON, URLs and HTML write them, in
    any case. Raises SecretError if `of` names the secret and every word is too short to be hidden."""
    parts = {*([] if text.count(" ") == 1 else [text]), *(each.strip("\"'") for each in _WORD.findall(text))}
    words = {word for word in parts if len(word) >= MIN_SECRET_LENGTH and word.lower() != "bearer"}
    if of and not words:
        what = f"a secret of fewer than {MIN_SECRET_LENGTH} characters cannot be kept out of runs and reports"
        raise SecretError(f"{of}: {what}", "Give the server a longer one; leave it out if the server asks for none.")
    for word in words:
        if word not in _known:
            spelled = json.dumps(word)[1:-1]
            for each in (word, spelled, spelled.replace("/", r"\/"), quote(word, safe=""), html.escape(word)):
                _known.update((each, each.lower(), each.upper()))
            with suppress(ValueError):  # Basic carries a name and a password
                carried = b64decode(word + "=" * (-len(word) % 4), validate=True).decode("ascii")
                register_secret(carried.partition(":")[2])


def hide_secrets(text: AnyStr, *, whole: bool = False) -> AnyStr:
    """Without the secrets that are known. Unless only `whole` ones are meant, also without what is left of one that was
    cut: half of it, or sixteen characters."""
    if not (_known and text):
        return text
    if isinstance(text, bytes):
        return hide_secrets(text.decode("utf-8", "surrogateescape"), whole=whole).encode("utf-8", "surrogateescape")
    for cut, secret in product((False,) if whole else (False, True), sorted(_known, key=len, reverse=True)):
        minimum = min(16, max(MIN_SECRET_LENGTH, len(secret) // 2)) if cut else len(secret)
        if secret[:minimum] in text:
            text = _without(text, secret[:minimum], secret[minimum:])
        if cut and secret[-minimum:] in text:  # its end, and what goes before
            text = _without(text[::-1], secret[: -minimum - 1 : -1], secret[-minimum - 1 :: -1])[::-1]
    return text


def _without(text: str, begin: str, more: str) -> str:
    first, *rest = text.split(begin)
    return first + "".join(HIDDEN + each[len(commonprefix([each, more])) :] for each in rest)  # noqa: RUF071 - of texts


def tls_context(ca_file: Path | None = None, insecure: bool = False) -> ssl.SSLContext:
    """Return a context that checks certificates against the system's authorities, or those of `ca_file`, unless
    `insecure`. Raises OSError for a file that cannot be read or holds no certificates."""
    import ssl  # 30 ms that plain HTTP must not cost

    if ca_file is None:
        context = ssl.create_default_context()
    else:
        with input_path(ca_file, CA_BYTES) as path:
            context = ssl.create_default_context(cafile=path)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def require_no_credentials(url: str) -> str:
    """This URL. Raises SecretError for one with credentials, which would be kept with the run."""
    if result := _CREDENTIALS.match(url):
        register_secret((result[1] or result[2]).replace(":", " ").replace("&", " "))
        raise SecretError(
            "a URL holds no user, password or ?key=...: it is kept with the run",
            "Put a key into LOADGEN_API_KEY (--api-key-env), or use --header 'Authorization: $NAME'.",
        )
    return url


def check_ca_file(file: Path | None) -> Path | None:
    """A file of authorities. Raises ValueError."""
    try:
        if file:
            tls_context(file)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror
        raise ValueError(f"cannot be read as certificates in PEM: {reason}") from None
    return file


def normalise_url(url: str) -> str:
    """The URL with its host's name in ASCII. Raises ValueError, and what `require_no_credentials` raises."""
    require_no_credentials(url)
    if not url.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    if re.search(r"[\x00-\x20\x7f]", url):
        raise ValueError("has a blank or a control character in it")
    try:
        parts = urlsplit(url)
        port, host = parts.port, (parts.hostname or "").encode("idna").decode()
    except ValueError as error:
        raise ValueError(f"is no URL: {error}") from None
    if not 0 < len(host) < 254:
        raise ValueError("names no host that can be: http://HOST:PORT")
    if not parts.path.isascii() or parts.query or parts.fragment:
        raise ValueError("may have a path, with what is not ASCII as %C3%BC, and nothing behind it")
    if not parts.netloc.isascii():
        parts = parts._replace(netloc=host if port is None else f"{host}:{port}")
    return urlunsplit(parts)


def check_headers(lines: tuple[str, ...]) -> tuple[str, ...]:
    """These headers as they are written. Raises ValueError."""
    for line in lines:
        result = HEADER.fullmatch(line)
        if not result:
            raise ValueError("must be written 'Name: value', in Latin letters and on one line")
        if result[1].lower() in _FRAMING:
            raise ValueError(f"loadgen sets {result[1]} itself")
    return lines


def redact_header(line: str) -> str:
    """A header as it may be kept: in place of a secret, the environment variable that may hold it."""
    name, colon, value = line.partition(":")
    if not colon:  # no header at all
        return line if re.fullmatch("[A-Za-z-]*", line) else "..."
    secret = _VALUE.search(value) or (_SECRET.search(name) and not _VARIABLE.search(value))
    return f"{name}: ${re.sub(r'[^A-Za-z0-9]', '_', name).upper()}" if secret else line


def redact(given: Any, name: str = "") -> Any:
    """Settings or a command line as they may be kept. Secrets in headers, options and variables are known from now on.
    `name` is what stands before them."""
    if isinstance(given, Mapping):
        return {key: redact(value, str(key)) for key, value in given.items()}
    if isinstance(given, list | tuple):
        names = [name] * len(given) if name == "header" else ["", *given]
        return [redact(each, str(before)) for before, each in zip(names, given, strict=False)]
    option, equals, value = given.partition("=") if isinstance(given, str) else ("", "", "")
    if equals and option.startswith("--"):
        return f"{option}={redact(value, option)}"
    name, retained = name.lstrip("-"), given
    if option and name == "header":
        retained = redact_header(given)
    elif option and _NAMED.fullmatch(name) and not given.startswith("-"):
        retained = "..."
    if retained != given:
        register_secret(given.partition(":")[2] if name == "header" else given)
    return retained


Address = tuple[int, tuple[Any, ...]]
"""Family and socket address, as `getaddrinfo` returns them."""


def address_text(address: Address) -> str:
    """Return the address as people write it, without the port."""
    return str(address[1][0])


class Target(msgspec.Struct, frozen=True):
    """Where the load goes: the server's addresses, and how to speak to the server."""

    host: str
    port: int
    path: str  # Path prefix of the URL, without a trailing slash
    tls: ssl.SSLContext | None
    addresses: tuple[Address, ...]  # Those that connections use, at least one
    unused: Mapping[
        str, str
    ] = {}  # Other addresses of the name, and why each is not used (loadgen.servers.wire.addresses)

    @property
    def host_field(self) -> str:
        """The Host header field: brackets around IPv6, and the port where it is not the scheme's own."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.tls else 80) else f"{host}:{self.port}"

    @property
    def facts(self) -> dict[str, Any]:
        """What the header of a run says of the addresses."""
        unused = {"addresses_unused": dict(self.unused)} if self.unused else {}
        return {"addresses": [address_text(address) for address in self.addresses], **unused}


def resolve_target(url: str, tls: ssl.SSLContext | None) -> Target:
    """Resolve an http:// or https:// URL to every address of its host. Without `tls` the system's certificate
    authorities are trusted. Raises OSError when the host's name has no address."""
    parts = urlsplit(url)
    host = parts.hostname or "127.0.0.1"
    secure = parts.scheme == "https"
    port = parts.port or (443 if secure else 80)
    import socket

    results = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    addresses = tuple(dict.fromkeys((int(family), address) for family, _, _, _, address in results))
    return Target(host, port, parts.path.rstrip("/"), (tls or tls_context()) if secure else None, addresses)


def connection_error(error: OSError | TimeoutError) -> str:
    """Return why a connection failed, in the system's words: asyncio's would name the address instead of the cause."""
    import ssl

    if isinstance(error, TimeoutError):
        return "no connection in time"
    if isinstance(error, LocalLimitError):
        return str(error.strerror)
    if isinstance(error, ssl.SSLError):
        if error.reason and error.reason.endswith("CERTIFICATE_REQUIRED"):
            return f"TLS: the server asks for a client certificate, and loadgen sends none ({error.reason})"
        return f"TLS: {getattr(error, 'verify_message', '') or error.reason or error}"
    return os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
