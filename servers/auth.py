"""Access to the server under test: request headers with an API key, TLS settings, and the proxy.

The module also registers every secret of the process, and removes registered secrets from text that is stored or shown.
"""

from __future__ import annotations

import html
import json
import os
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from contextlib import suppress
from os.path import commonprefix
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any, AnyStr, NamedTuple
from urllib.parse import quote, urlsplit, urlunsplit

from loadgen.servers.errors import SecretError
from loadgen.workloads.http_headers import FRAMING, HEADER
from loadgen.workloads.input_files import input_path

if TYPE_CHECKING:
    import ssl

    from loadgen.servers.proxy import Proxy

HIDDEN = "***"
CA_BYTES = 1 << 24
"""Maximum size in bytes of a file of CA certificates. The file of an operating system has about 0.2 MB."""
MIN_SECRET_LENGTH = 6
"""Minimum length in characters of a secret that `hide_secrets` removes. Shorter texts occur in ordinary words."""
_SECRET_NAME = re.compile("auth|cookie|credential|key|password|secret|signature|token", re.IGNORECASE)
_SECRET_VALUE = re.compile(
    r"(?i:bearer|basic) +[^ $]|\b(?:g?sk|pk|hf|gh[a-z]|nvapi|xox[a-z])[-_]\w{4}|"
    r"(?=\S*\d)(?=\S*[a-z])(?=\S*[A-Z])[^\s$]{32}"
)
"""Matches the beginning of a secret in a header value, whatever the name of the header."""
_SECRET_OPTION = re.compile(r"(?i)[\w-]*(?:key|password|secret|token)")
"""Names of options and environment variables that hold secrets. `--max-tokens` and `--api-key-env` do not match."""
_SECRET_FIELD = re.compile(
    r"(?i)(?:[\w-]*[_-])?(?:api[_-]?key|access[_-]?key|private[_-]?key|auth|authorization|bearer|cookie|credentials?|"
    r"pass(?:word|wd|phrase)|pwd|jwt|signature|secret|(?<!cache[_-])(?<!cache)key|"
    r"(?<!bos[_-])(?<!eos[_-])(?<!pad[_-])(?<!unk[_-])(?<!stop[_-])(?<!image[_-])token)|"
    r"(?-i:[a-z]\w*(?:Key|Secret|Token|Password))"
)
"""Names of fields of a request body that hold secrets. `prompt_cache_key` and `eos_token` do not match."""
_SECRET_TEXT = re.compile(r"(?i)(?:bearer|basic) +[^ $]|\b(?:g?sk|pk|hf|gh[a-z]|nvapi|xox[a-z])[-_]\w{4}")
"""Matches the beginning of a secret in the value of a field with any name."""
_COMMAND_NAME = r"\b(?:[\w-]*[_-])?(?:(?:api|access|private)?key|password|passwd|passphrase|secret|token|credentials?)"
_COMMAND_VALUE = r"""((?!\*{3}|\S+\.(?:pem|key|crt)\b)(?:'[^'$]+'|"[^"$]+"|[^\s"'$;&|\\]+))"""
"""The value of a secret in a shell command. Variables such as `$KEY` and names of key files do not match."""
_COMMAND_SECRETS = tuple(
    re.compile(pattern, re.IGNORECASE)
    for pattern in (
        r"""(\b(?:authorization|cookie) *: *+(?:(?:bearer|basic|token) ++)?+)((?!\*{3})[^"'$]+)""",
        r"(\b(?:bearer|basic +(?=[^\s]*(?-i:[A-Z\d]))) *)(?<= )" + _COMMAND_VALUE,
        rf"""({_COMMAND_NAME}["'\\]*\s*[:=]\s*\\?)""" + _COMMAND_VALUE,
        rf"((?<!\S)--?{_COMMAND_NAME} +)" + _COMMAND_VALUE,
        r"""((?<!\S)(?:-u|--user|--proxy-user)[ =]*["']?[^\s:"'$]+:)((?!\*{3})[^\s"'$]+)""",
        r"""(://[^\s/:@"']*:)((?!\*{3})[^\s/@"'$]+)(?=@)""",
        r"()(\b(?:g?sk|pk|hf|gh[a-z]|nvapi|xox[a-z])[-_]\w{4}[\w-]*)",
    )
)
"""Match the secrets in a shell command. Group 1 is the text before a secret, and group 2 is the secret."""
_KEY_VARIABLES = ("OPENAI_API_KEY", "VLLM_API_KEY", "HF_TOKEN")
"""Environment variables in which users of other tools keep the API key of a server."""
_VARIABLE_NAME = re.compile(
    r"(?=.{1,16}$|\w*_)(?=.{1,48}$)(?:[A-Z0-9_]*(?<![0-9])|_*[A-Za-z]+\d{0,2}(?:_(?:[A-Za-z]+\d{0,2}|\d{1,4}))*)"
)
"""Matches names that people give to environment variables. Keys are longer words, or mix letters and digits."""
_CREDENTIALS = re.compile(r"(?:\w+:/*)?([^/@?]*)@|[^?]*\?(.*(?:auth|key|password|secret|sig|token).*)")
_SEVERAL_URLS = re.compile(r"(?:https?://)?[^/\s]*[,;]|\S+[,;\s]\s*(?:https?://|[\w.-]+:\d)\S")
"""Matches a list of URLs or hosts: several hosts, or a separator before another `http://` or `HOST:PORT`."""
ONE_SERVER = (
    "holds several URLs. For replicas of one server, repeat the option: --url URL --url URL (loadgen burst, run and "
    "sweep), or url = [...] in a plan file. For different servers, make one run each: loadgen compare RUN RUN"
)
"""Message for several URLs in one option. It says what to write instead."""
_VARIABLE = re.compile(r"(?<!\$)(?:\$\$)*\$[A-Za-z_{]")
_WORD = re.compile(r"[^\s;,=]+(?=[\s;,]|=*$)")
API_KEY_VARIABLE = "LOADGEN_API_KEY"
"""Environment variable that holds the API key, unless the user names another one."""
KEY_PASSPHRASE_VARIABLE = "LOADGEN_KEY_PASSPHRASE"  # noqa: S105 - a name
"""Environment variable that holds the passphrase of the client's private key."""
_known: set[str] = set()


class TlsFiles(NamedTuple):
    """The arguments of `tls_context`. A subprocess that receives them can create a context with the same settings."""

    ca_file: Path | None = None
    insecure: bool = False
    cert: Path | None = None
    key: Path | None = None


class Access(NamedTuple):
    """Credentials, TLS settings and proxy for one server. Secrets are never written to a run file."""

    headers: dict[str, str] = {}  # noqa: RUF012 - never modified
    """Headers of every request."""
    tls: ssl.SSLContext | None = None
    """TLS settings. None: the system's certificate authorities, loaded only for https because that takes 90 ms."""
    proxy: Proxy | None = None
    """The HTTP proxy to connect through. None: connect directly."""
    files: TlsFiles = TlsFiles()
    """The files from which `tls` was made."""


NO_AUTH = Access()
"""Access to a server that requires no key."""


def read_secret(variable: str, environ: Mapping[str, str] = os.environ) -> str:
    """Return the secret in the environment variable `variable`, or "" if the variable is not set.

    The secret is also registered with `register_secret`. White space around the secret is removed, because mounted
    secret files end with a newline.

    Raises SecretError if the secret cannot be sent in a header, or is too short to be hidden. Also raises SecretError
    if `variable` looks like a key and not like the name of a variable. The error message does not contain the secret.
    """
    if variable and variable not in environ and _looks_like_key(variable):
        register_secret(variable)
        raise SecretError(
            "--api-key-env takes the name of an environment variable, but this looks like a key",
            "Put the key into a variable and name it: export LOADGEN_API_KEY=..., --api-key-env LOADGEN_API_KEY",
        )
    secret = environ.get(variable, "").strip()
    if not re.fullmatch("[ -~]*", secret):
        raise SecretError(
            f"{variable}: a key cannot contain line breaks, control characters or non-ASCII letters",
            f"Set it to the key alone: export {variable}=...",
        )
    register_secret(secret, source=secret and variable)
    return secret


def _looks_like_key(word: str) -> bool:
    """Return True if the word is probably an API key and not the name of an environment variable."""
    return not _VARIABLE_NAME.fullmatch(word) or bool(_SECRET_TEXT.search(word) and not word.isupper())


def key_hint(headers: Mapping[str, str], environ: Mapping[str, str] = os.environ) -> str:
    """Return a hint for a user whose server requires an API key, or refuses the key in the request headers `headers`.

    Users may have a key in a variable of another tool, such as OPENAI_API_KEY. If the key in such a variable was not
    sent, the hint names the variable.
    """
    sent = " ".join(headers.values())
    for variable in _KEY_VARIABLES:
        key = environ.get(variable, "").strip()
        if key and key not in sent:
            return f"{variable} is set; to send its key, add --api-key-env {variable}"
    return "put the key into the environment variable that --api-key-env names (LOADGEN_API_KEY)"


def register_secret(text: str, *, source: str = "") -> None:
    """Register the secrets in `text`, so that `hide_secrets` removes them from now on.

    Each word of at least MIN_SECRET_LENGTH characters is a secret. It is registered in every form in which it may
    appear: as JSON, URLs and HTML encode it, and in lower and upper case. If a word is `user:password` in Base64, the
    password is registered too.

    `source` names the option or variable that contains the secret. If `source` is given and no word is long enough,
    SecretError is raised.
    """
    parts = {word.strip("\"'") for word in _WORD.findall(text)}
    if text.count(" ") != 1:
        parts.add(text)
    words = {word for word in parts if len(word) >= MIN_SECRET_LENGTH and word.lower() != "bearer"}
    if source and not words:
        raise SecretError(
            f"{source}: a secret of fewer than {MIN_SECRET_LENGTH} characters cannot be kept out of runs and reports",
            "Give the server a longer secret, or leave it out if the server requires none.",
        )
    for word in words:
        if word in _known:
            continue
        in_json = json.dumps(word)[1:-1]
        for form in (
            word,
            in_json,
            in_json.replace("/", r"\/"),
            quote(word, safe="", errors="surrogatepass"),
            quote(word, errors="surrogatepass"),
            html.escape(word),
        ):
            _known.update((form, form.lower(), form.upper()))
        with suppress(ValueError):  # Basic authentication encodes `user:password`
            user_and_password = b64decode(word + "=" * (-len(word) % 4), validate=True).decode("ascii")
            register_secret(user_and_password.partition(":")[2])


def register_environment_key() -> None:
    """Register the API key in LOADGEN_API_KEY as a secret.

    As a result, commands hide the key in their output, even if the user passes it to a wrong option.
    """
    key = os.environ.get(API_KEY_VARIABLE, "")
    if len(key) >= MIN_SECRET_LENGTH:
        register_secret(key)


def hide_secrets(text: AnyStr, *, whole: bool = False) -> AnyStr:
    """Return `text` with every registered secret replaced by `***`.

    By default, a truncated secret is replaced too, if enough of its beginning or its end is left. Half of the secret is
    enough, if this half has at least MIN_SECRET_LENGTH characters. 16 characters are always enough. If `whole` is True,
    only complete secrets are replaced.
    """
    if not (_known and text):
        return text
    if isinstance(text, bytes):
        return hide_secrets(text.decode("utf-8", "surrogateescape"), whole=whole).encode("utf-8", "surrogateescape")
    longest_first = sorted(_known, key=len, reverse=True)
    for secret in longest_first:
        if secret in text:
            text = text.replace(secret, HIDDEN)
    if whole:
        return text
    for secret in longest_first:
        minimum = min(16, max(MIN_SECRET_LENGTH, len(secret) // 2))
        if secret[:minimum] in text:
            text = _hide_part(text, secret[:minimum], secret[minimum:])
        if secret[-minimum:] in text:
            # The last part of a secret is hidden by reading the text and the secret backwards.
            backwards = secret[::-1]
            text = _hide_part(text[::-1], backwards[:minimum], backwards[minimum:])[::-1]
    return text


def _hide_part(text: str, begin: str, rest: str) -> str:
    """Replace every occurrence of `begin`, the first characters of a secret, in `text` by `***`.

    `rest` is the remaining part of the secret. Characters after an occurrence are also replaced as long as they
    continue the secret.
    """
    first, *others = text.split(begin)
    return first + "".join(HIDDEN + part[len(commonprefix([part, rest])) :] for part in others)  # noqa: RUF071 - texts, not paths


def tls_context(
    ca_file: Path | None = None, insecure: bool = False, cert: Path | None = None, key: Path | None = None
) -> ssl.SSLContext:
    """Return a TLS context for connections to the server.

    The server's certificate is checked against the authorities in `ca_file`. By default, the authorities of the
    operating system are used. With `insecure`, the certificate is not checked. `cert` is the client's certificate, and
    `key` is its private key. Without `key`, the file `cert` must contain the private key too. Raises OSError if a file
    cannot be read or contains no certificates, and SecretError if the passphrase of the private key is missing.
    """
    import ssl  # 30 ms that plain HTTP must not cost

    if ca_file is None:
        context = ssl.create_default_context()
    else:
        with input_path(ca_file, CA_BYTES) as path:
            context = ssl.create_default_context(cafile=path)
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    if cert is not None:
        with input_path(cert, CA_BYTES) as cert_path, input_path(key or cert, CA_BYTES) as key_path:
            context.load_cert_chain(cert_path, key_path, _key_passphrase)
    return context


def _key_passphrase() -> str:
    """Return the passphrase of the client's private key. OpenSSL calls this function only for an encrypted key.

    Raises SecretError if the passphrase is not set."""
    passphrase = os.environ.get(KEY_PASSPHRASE_VARIABLE, "")
    if not passphrase:
        raise SecretError(
            "--key: the private key is encrypted", f"Put its passphrase into the variable {KEY_PASSPHRASE_VARIABLE}."
        )
    register_secret(passphrase)
    return passphrase


def client_certificate_mistake(cert: Path | None, key: Path | None) -> str:
    """Return a message if the client's certificate and private key cannot be used, otherwise "".

    Raises SecretError if the passphrase of the private key is missing."""
    if cert is None:
        return "--key needs a certificate: name its file with --cert" if key else ""
    named = f"--cert {cert}" + (f" and --key {key}" if key else "")
    try:
        tls_context(cert=cert, key=key)
    except OSError as error:
        reason = getattr(error, "reason", None)
        if reason is None and error.errno is not None:
            return f"{named}: {error.strerror}"
        if reason == "KEY_VALUES_MISMATCH":
            return f"{named}: the private key does not belong to the certificate"
        if reason in ("BAD_DECRYPT", "BAD_PASSWORD_READ"):
            return f"{named}: the passphrase in {KEY_PASSPHRASE_VARIABLE} is wrong"
        where = "" if key else "; name the file of the private key with --key if it is a separate file"
        return f"{named}: no certificate and private key in PEM: {reason or error}{where}"
    return ""


def require_no_credentials(url: str) -> str:
    """Return the URL unchanged. Raises SecretError if it contains credentials.

    URLs are stored in run files, so they must not contain secrets.
    """
    result = _CREDENTIALS.match(url)
    if result:
        register_secret((result[1] or result[2]).replace(":", " ").replace("&", " "))
        raise SecretError(
            "a URL must not contain a user, a password or ?key=...: it is stored with the run",
            "Put the key into LOADGEN_API_KEY (--api-key-env), or use --header 'Authorization: $NAME'.",
        )
    return url


def require_one_url(value: Any) -> Any:
    """Return the value of a URL setting unchanged.

    Raises ValueError if the value is a list of URLs or hosts. Raises SecretError if a URL in such a list contains
    credentials."""
    text = " ".join(map(str, value)) if isinstance(value, list | tuple) else str(value).strip()
    if _SEVERAL_URLS.match(text):
        for url in re.split(r"[,;\s]+", text):
            require_no_credentials(url)
        raise ValueError(ONE_SERVER)
    return value


def check_ca_file(file: Path | None) -> Path | None:
    """Return the path unchanged. Raises ValueError if the file contains no CA certificates in PEM format."""
    try:
        if file:
            tls_context(file)
    except OSError as error:
        reason = getattr(error, "reason", None) or error.strerror
        raise ValueError(f"cannot be read as certificates in PEM: {reason}") from None
    return file


def normalise_url(url: str) -> str:
    """Return the URL, with an international host name converted to ASCII (IDNA).

    Raises ValueError for an invalid URL, and SecretError for a URL with credentials."""
    require_one_url(require_no_credentials(url))
    if not url.startswith(("http://", "https://")):
        raise ValueError("must start with http:// or https://")
    if re.search(r"[\x00-\x20\x7f]", url):
        raise ValueError("must not contain spaces or control characters")
    try:
        parts = urlsplit(url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except ValueError as error:
        raise ValueError(f"is not a valid URL: {error}") from None
    if not 0 < len(host) < 254:
        raise ValueError("has no valid host name: write http://HOST:PORT")
    if not parts.path.isascii() or parts.query or parts.fragment:
        raise ValueError("may end in a path, in ASCII (write ü as %C3%BC), but not in a query or a fragment")
    if not parts.netloc.isascii():
        parts = parts._replace(netloc=host if port is None else f"{host}:{port}")
    return urlunsplit(parts)


def check_headers(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Return the header lines unchanged if all of them are valid.

    Raises ValueError for a malformed line, and for a header that loadgen sets itself, such as `Content-Length`."""
    for line in lines:
        result = HEADER.fullmatch(line)
        if not result:
            raise ValueError("must be written 'Name: value', in Latin letters and on one line")
        if result[1].lower() in FRAMING:
            raise ValueError(f"loadgen sets {result[1]} itself")
    return lines


def redact_header(line: str) -> str:
    """Return a header line in a form that may be stored.

    A secret value is replaced by the name of an environment variable, for example `Authorization: $AUTHORIZATION`.
    """
    name, colon, value = line.partition(":")
    if not colon:  # not a header
        return line if re.fullmatch("[A-Za-z-]*", line) else "..."
    is_secret = _SECRET_VALUE.search(value) or (_SECRET_NAME.search(name) and not _VARIABLE.search(value))
    if not is_secret:
        return line
    variable = re.sub(r"[^A-Za-z0-9]", "_", name).upper()
    return f"{name}: ${variable}"


def redact_command(text: str) -> str:
    """Return a shell command in a form that may be stored. Each secret is replaced by `***`.

    Secrets are recognised by their form or by the word before them, such as `Bearer`, `--password` or `API_KEY=`. They
    are also registered, so that `hide_secrets` removes them from the output of the command. Variables such as `$KEY`
    are not secrets.
    """

    def hide(match: re.Match[str]) -> str:
        register_secret(match[2].strip("\"'"))
        return match[1] + HIDDEN

    for pattern in _COMMAND_SECRETS:
        text = pattern.sub(hide, text)
    return hide_secrets(text, whole=True)


def redact_commands(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Return `texts` with each secret replaced by `***`. Each text is a value of --at: a time and a shell command.

    For example, `10m backup --password abc` becomes `10m backup --password ***`. `redact_command` describes how secrets
    are recognised.
    """
    return tuple(map(redact_command, texts))


def register_commands(texts: tuple[str, ...]) -> tuple[str, ...]:
    """Register every secret in commands of --at, and return the commands unchanged."""
    redact_commands(texts)
    return texts


def _is_secret_field(name: str, value: Any) -> bool:
    """Return True if a field of a request body holds a secret.

    Text that contains a variable, such as `$KEY`, does not count as a secret."""
    if isinstance(value, str):
        named_secret = _SECRET_FIELD.fullmatch(name) and value and not _VARIABLE.search(value)
        return bool(named_secret or _SECRET_TEXT.search(value))
    is_number = isinstance(value, int | float) and len(str(value)) >= MIN_SECRET_LENGTH
    return is_number and bool(_SECRET_FIELD.fullmatch(name))


def redact_fields(fields: Any, name: str = "") -> Any:
    """Return fields of a request body in a form that may be stored.

    Each secret is replaced by the name of an environment variable, for example `{"api_key": "$API_KEY"}`. `name` is the
    name of the field that contains `fields`.
    """
    if isinstance(fields, Mapping):
        return {key: redact_fields(value, str(key)) for key, value in fields.items()}
    if isinstance(fields, list | tuple):
        return [redact_fields(value, name) for value in fields]
    if not _is_secret_field(name, fields):
        return fields
    return "$" + re.sub(r"[^A-Za-z0-9]", "_", name).upper()


def register_fields(fields: Any, name: str = "") -> Any:
    """Register every secret in the fields of a request body, and return the fields unchanged.

    Raises SecretError for a secret that is too short to be hidden."""
    if isinstance(fields, Mapping):
        for key, value in fields.items():
            register_fields(value, str(key))
    elif isinstance(fields, list | tuple):
        for value in fields:
            register_fields(value, name)
    elif _is_secret_field(name, fields):
        register_secret(str(fields), source=f"--extra-body {name}" if _SECRET_FIELD.fullmatch(name) else "")
    return fields


def fill_fields(fields: Any, environ: Mapping[str, str] = os.environ, name: str = "") -> Any:
    """Return fields of a request body with the values of environment variables filled in.

    A variable such as `$API_KEY` is replaced only if the name of its field shows that the field holds a secret, for
    example `api_key`. Raises SecretError if a variable is not set, or if its content is too short to be hidden in the
    output.
    """
    if isinstance(fields, Mapping):
        return {key: fill_fields(value, environ, str(key)) for key, value in fields.items()}
    if isinstance(fields, list | tuple):
        return [fill_fields(value, environ, name) for value in fields]
    if not (isinstance(fields, str) and _SECRET_FIELD.fullmatch(name) and _VARIABLE.search(fields)):
        return fields
    try:
        secret = Template(fields).substitute({key: content.strip() for key, content in environ.items()})
    except KeyError as error:
        variable = error.args[0]
        message = f"--extra-body {name}: ${variable} is not set"
        raise SecretError(message, f"Set the environment variable {variable}.") from None
    except ValueError:
        raise SecretError(
            f"--extra-body {name}: no name of an environment variable follows the $", "Write $$ for a dollar sign."
        ) from None
    register_secret(secret, source=f"--extra-body {name}")
    return secret


def _redact_json(text: str) -> str:
    """Return `text`, the value of `--extra-body`, in a form that may be stored.

    - In JSON, each secret is replaced by the name of an environment variable, for example `{"api_key": "$API_KEY"}`.
    - A reference to a file, such as `@FILE`, is returned unchanged.
    - Other text is returned unchanged, or replaced by `...` if it may contain a secret.
    """
    if text.startswith("@"):
        return text
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        words = re.findall(r"[\w-]+", text)
        return "..." if _SECRET_TEXT.search(text) or any(map(_SECRET_FIELD.fullmatch, words)) else text
    with suppress(SecretError):
        register_fields(fields)
    redacted = redact_fields(fields)
    return text if redacted == fields else json.dumps(redacted)


def _is_key_file(name: str, value: str) -> bool:
    """Return True if `value` is the name of a file with a private key.

    Only the option `--key` takes such a file. `name` is the name of an option without its dashes, such as `key`.
    """
    return name == "key" and (value.endswith((".pem", ".key")) or os.path.isfile(value))  # noqa: PTH113 - never raises


def _names_before(values: Sequence[Any], name: str) -> list[str]:
    """Return a list with a name for each of the `values`, from which `redact` decides whether the value is a secret.

    - If the argument `name` is `header` or `at`, the values are HTTP headers or commands of the option --at. The list
      then contains the argument `name` for every value.
    - Otherwise, the values are the words of a command line, and each word is named after the word before it. For
      example, the words `--api-key` and `abc` give `abc` the name `--api-key`. The option --at takes two words, a time
      and a command, and both get the name `--at`. The first word of the command line gets an empty name.
    """
    if name in ("header", "at"):
        return [name] * len(values)
    names = ["", *map(str, values)][: len(values)]
    for index in range(2, len(values)):
        if values[index - 2] == "--at" and not str(values[index]).startswith("-"):
            names[index] = "--at"
    return names


def redact(value: Any, name: str = "") -> Any:
    """Return settings or command-line arguments in a form that may be stored.

    `value` is one value, or a list or mapping of values. `name` is the key of the setting, or the command-line argument
    before `value`. Secrets in headers, options, environment variables, request bodies and commands of --at are
    replaced. They are also registered with `register_secret`.
    """
    if name.lstrip("-").replace("-", "_") == "extra_body":
        return _redact_json(value) if isinstance(value, str) else redact_fields(value)
    if isinstance(value, Mapping):
        return {key: redact(member, str(key)) for key, member in value.items()}
    if isinstance(value, list | tuple):
        return [redact(item, before) for before, item in zip(_names_before(value, name), value, strict=True)]
    return _redact_text(value, name) if isinstance(value, str) else value


def _redact_text(value: str, name: str) -> str:
    """Return the setting or command-line argument `value` with its secrets replaced, so that it may be stored.

    `name` is the key of the setting, or the command-line argument before `value`.
    """
    option, equals, argument = value.partition("=")
    if equals and option.startswith("--"):
        return f"{option}={redact(argument, option)}"
    name = name.lstrip("-")
    if name == "at":
        return redact_command(value)
    redacted = value
    if option and name == "header":
        redacted = redact_header(value)
    elif option and _SECRET_OPTION.fullmatch(name) and not value.startswith("-") and not _is_key_file(name, value):
        redacted = "..."
    if redacted != value:
        register_secret(value.partition(":")[2] if name == "header" else value)
    return redacted
