"""Removes what looks like a secret from a config, before others can read it in a table or a store."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import OmegaConf
from omegaconf._utils import get_omega_conf_dumper

from ddp_hydra.storage.files import write_atomic

SECRET = {
    "auth", "authorization", "cookie", "credential", "credentials", "passphrase", "passwd",
    "password", "pw", "pwd", "secret", "sig", "signature",
}  # fmt: skip
OF_MODELS = {"signatures"}
"""Plurals of words of `SECRET` that are none."""
SECRET_AT_THE_END = {"key", "token"}
"""Words that are secret as the last one, except for short numbers: "d_key" may be a size of a model."""
OF_ACCESS = {
    "access", "account", "aes", "api", "bearer", "bot", "cipher", "client", "crypto", "decrypt", "decryption",
    "deploy", "encrypt", "encryption", "gpg", "hmac", "jwt", "license", "login", "master", "private", "recovery",
    "refresh", "rsa", "security", "session", "sign", "signing", "ssh", "storage", "wallet", "webhook",
}  # fmt: skip
"""Words next to which "key" and "token" are no size of a model: numbers of such a name are secret, too."""
_JOINED = re.compile(
    rf"((?:(?<![a-z])(?:bot|sign)|{'|'.join(sorted({*OF_ACCESS, 'auth', 'secret'} - {'bot', 'sign'}))})+)"
    r"(key|secret|token)(?=s?([^a-z]|$))"
)
"""Matches two words that are written as one: "secretkey", "awsaccesstoken"; not the end of "robot" and "assign"."""
ONE_TIME = {"otp", "passcode"}
"""Words that are secret as the last one; "otp_ratio" is a number of something else."""
HARMLESS = {
    "bos", "caption", "class", "cls", "column", "eos", "group", "image", "index", "input", "label", "mask", "output",
    "pad", "primary", "sep", "sort", "special", "start", "stop", "target", "text", "unk",
}  # fmt: skip
"""Words next to which "key" and "token" belong to a column or a vocabulary, without a word of `OF_ACCESS`."""
SHORT = {"pass", "pin"}
"""Words that are secret as the last one, directly behind one of `ACCOUNT`; else a filter, or a pass over data."""
ACCOUNT = {
    "account", "admin", "bank", "card", "database", "db", "email", "ftp", "http", "imap", "ldap", "login", "mail",
    "mongo", "mongodb", "mysql", "pg", "postgres", "postgresql", "proxy", "redis", "root", "sftp", "sim", "smtp",
    "sql", "ssh", "sudo", "user", "vpn", "wifi",
}  # fmt: skip
"""Words that name an account, a service with accounts, or a card: "db_pass", "bank_pin"."""
PLACE = {"dir", "file", "filename", "folder", "path"}
"""Words at the end of the name of a file or folder, which is no secret, even where its content is."""
FILE_KEY = {"ssl", "tls"}
"""Words next to which "key" is the name of a file. Dask also takes the key's text, which `_PEM` matches."""
OF_FILE_KEY = {"ca", "client", "comm", "dask", "distributed", "private", "scheduler", "server", "worker"}
"""Words that may stand next to such a key."""
HIDDEN = "***"
_PEM = re.compile("-----BEGIN [A-Z ]*PRIVATE KEY")
"""Matches a private key itself, whatever the name of the setting."""
_WHOLE = r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'|\$?\{(?:[^{}]|\{[^{}]*\})*\}|\[(?:[^][]|\[[^][]*\])*\]"""
"""Matches a quoted text, a dict, a list or an interpolation, which may hold commas and spaces."""
_WORD = re.compile(rf"([\w./]+)=({_WHOLE}|(?:\\.|[^,\s])+(?: +\d+(?![^,\s]))*)")
"""Matches an override inside a text, such as hydra.job.override_dirname."""
_FIELD = re.compile(r"""(?<=[=;'"])([\w./]+)=([^,;\s]+)""")
"""Matches a field of a connection string, which is itself a value."""
_ENTRY = re.compile(rf"""((?<!\$)[{{,]\s*["']?)([\w.-]+)(["']?\s*:\s*)({_WHOLE}|(?:\\.|[^,}}\]])+)""")
"""Matches a key and its value in a dict, as Hydra and JSON write it; not a resolver, as in "${secret:name}"."""

_NUMBER = re.compile(r"[+-]?(?!0\d)(\d+\.?\d*|\.\d+)(e[+-]?\d\d?)?", re.IGNORECASE)
"""Matches a number as Hydra reads it: 007 is a text."""
_DIGITS = 5
"""A number of so many digits is too short to be a key or a token."""
_NUMBERS = 4
"""More numbers in a list may be the bytes of a key."""
_OF_SWEEPS = re.compile(r"(choice|float|int|interval|range|shuffle|sort|tag)\(|(start|step|stop)=|\)|\[(?!\[)|\]")
"""Matches what stands next to numbers in lists and sweeps: "tag(log, int(interval(4, 64)))"."""

_PAIR = re.compile(
    r"""^\s*([\w.-]+)\s*=\s*(.+)|([\w./-]+)["']?\s*:(?:\s+|$)"""
    r"""((?=(\[[^\]]*|\{[^}]*))[{[]|[^,}\]]*(?:,[^:}\]]*(?=[}\]]|$))?)"""
)
"""Matches a key and its value in a line of YAML, JSON or TOML. Of a list or a dict, the bracket alone is passed."""
_SUSPECT = re.compile("|".join([*sorted(SECRET | SECRET_AT_THE_END | ONE_TIME | SHORT), "://"]), re.IGNORECASE)
"""A quick test: matches in every line that may hold a secret, and in some that do not."""
_NOTHING: tuple[object, ...] = ("", "null", [], "[]", "value")
"""Values that are never secret; the last one stands in the text of --help, which is in each config."""
_DEFAULT = re.compile(
    r"""\boc\.(?:env|select):(?:[^,{}]|\{[^{}]*\})*,(?!\s*(?:\$\{|(?:null|true|false|["'\\]*)\s*(?:\}|$)))([^{}]*)"""
)
"""Matches an interpolation with its default, which is a text or a number: "${oc.env:NAME,text}"."""
_NO_SECRETS = ("", "null", "~", "true", "false", "???", '""', "''", "{", "[")

_LOGIN = re.compile(r"(https?://)[^/@\s]*@|(://)[^/@\s:]*:[^/@\s]*@")
"""Matches user and password in an address. A name alone may be a token, but of a web server only."""


def is_secret(name: str, value: object, is_typed: bool = False) -> bool:
    """Return whether a value has to be hidden: its name looks like that of a secret, and it may be one.

    Args:
        is_typed: whether the value is a text as it was typed, or as it is in a file, in which a number has no quotes.
    """
    kind = _kind_of(name)
    if not kind or value is None or isinstance(value, bool) or value in _NOTHING:
        return False
    if isinstance(value, str) and value.strip("'\"").startswith("${"):
        return any(kind == "secret" or not _is_count(default, is_typed=True) for default in _DEFAULT.findall(value))
    return not (kind == "key" and _is_count(value, is_typed))


def _is_count(value: object, is_typed: bool) -> bool:
    """Return whether a value is a short number, or a list or a sweep of a few of them."""
    text = value if is_typed and isinstance(value, str) else repr(value)
    parts = [_OF_SWEEPS.sub("", part).strip() for part in text.split(",")]
    numbers = [part for part in parts if part not in ("log", "null")]
    return 0 < len(numbers) <= _NUMBERS and all(map(_is_short, numbers))


def _is_short(text: str) -> bool:
    found = _NUMBER.fullmatch(text)
    digits = found[1].replace(".", "").strip("0") if found else ""
    return found is not None and len(digits) <= _DIGITS and abs(float(text)) < 10**_DIGITS


def named_secret(name: str) -> bool:
    return bool(_kind_of(name))


@functools.lru_cache(maxsize=4096)
def _kind_of(name: str) -> Literal["", "key", "secret"]:
    """Return "key" for a name that only ends like that of a secret: a short number of it is none."""
    plain = re.sub("([a-z])([A-Z])", r"\1_\2", re.split("[./]", name)[-1]).lower()
    words = [word for word in re.split("[^a-z]+", _JOINED.sub(r"_\1_\2", plain)) if word]
    if words[-1:] and words[-1] in PLACE:
        return ""
    if words[-1:] == ["key"] and not FILE_KEY.isdisjoint(words) and set(words[:-1]) <= FILE_KEY | OF_FILE_KEY:
        return ""
    singular = {word.removesuffix("s") for word in words if word not in OF_MODELS}
    if not SECRET.isdisjoint(singular) or "password" in plain or "apikey" in plain:
        return "secret"
    if words[-1:] and (words[-1] in ONE_TIME or (words[-1] in SHORT and not ACCOUNT.isdisjoint(words[-2:-1]))):
        return "secret"
    end = words[-2:-1] if words[-1:] == ["id"] else words[-1:]
    is_of_access = not OF_ACCESS.isdisjoint(words)
    if not SECRET_AT_THE_END.isdisjoint(end):
        return "secret" if is_of_access else "key" if HARMLESS.isdisjoint(words) else ""
    are_several = not SECRET_AT_THE_END.isdisjoint(word.removesuffix("s") for word in end)
    return "key" if are_several and not OF_ACCESS.isdisjoint({*words} - {"client"}) else ""


def bare(text: str) -> str:
    """Remove the parts of an address that may be secret: user and password, and the query of a signed address."""
    return re.sub(r"(?<=://)[^/@\s]*@", "", re.sub(r"(://[^?\s]*)\?[^\s'\",\]}]*", r"\1", text))


def yaml_text(config: Any) -> str:
    """Return a config as OmegaConf writes it, without its secrets. Interpolations stay."""
    content = without(OmegaConf.to_container(config, enum_to_str=True) if OmegaConf.is_config(config) else config)
    hydra = found if isinstance(content, dict) and isinstance(found := content.get("hydra"), dict) else {}
    words, job = (hydra.get("overrides") or {}).get("task"), hydra.get("job") or {}
    if str(words).count(HIDDEN) > str(job.get("override_dirname")).count(HIDDEN):  # it may have other separators
        job["override_dirname"] = HIDDEN
    return str(yaml.dump(content, Dumper=_dumper(), default_flow_style=False, allow_unicode=True, sort_keys=False))


@functools.cache
def _dumper() -> type[yaml.Dumper]:
    """Return OmegaConf's dumper, with libyaml where that is there: it takes a quarter of the time."""
    theirs = get_omega_conf_dumper()
    return type("Dumper", (getattr(yaml, "CDumper", yaml.Dumper),), {"yaml_representers": theirs.yaml_representers})


def rewrite(path: Path) -> None:
    """Remove the secrets from a file that Hydra has written, if there is one; without any it is not changed."""
    if not path.is_file():
        return
    with suppress(yaml.YAMLError):  # such as a tag that only OmegaConf knows
        quickly = yaml.load(path.read_bytes(), getattr(yaml, "CSafeLoader", yaml.SafeLoader))  # noqa: S506
        if without(quickly) == quickly:
            return
    write_atomic(path, yaml_text(OmegaConf.load(path)).encode(), durable=False)


def without(value: Any) -> Any:
    """Return a config of dicts and values, or a list of overrides, with `HIDDEN` in place of each secret."""
    if isinstance(value, dict):
        return {key: HIDDEN if is_secret(str(key), inner) else without(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [without(inner) for inner in value]
    return _override(value) if isinstance(value, str) else value


def hidden(config: dict[str, Any]) -> Iterator[str]:
    """Yield the keys whose value, or a part of it, was removed by `without`."""
    return (key for key, value in values_of(config) if isinstance(value, str) and HIDDEN in value)


def leaves(node: Any, prefix: str = "", inside: tuple[type, ...] = (Mapping,)) -> Iterator[tuple[str, Any]]:
    """Yield the values of a config, each by its key: ("optimizer.lr", 0.1).

    Args:
        inside: types of values that are not yielded, but what is in them. An empty one is a value.
    """
    for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
        if isinstance(value, inside) and value:
            yield from leaves(value, f"{prefix}{key}.", inside)
        else:
            yield f"{prefix}{key}", value


values_of = functools.partial(leaves, inside=(Mapping, list))
"""The same with the items of lists: ("callbacks.0._target_", "models.gan.ShowSamples")."""


def secret_line(text: str) -> str | None:
    """Return the first line of a YAML, JSON or TOML text that seems to hold a secret itself; None if none does.

    The text is not parsed: a project has many files, and a line that only looks like one does little harm.
    """
    for line in text.splitlines():
        if not _SUSPECT.search(line) or line.lstrip().startswith("#"):
            continue
        bare_line = line.partition(" #")[0]
        pairs = (
            (found[1] or found[3], (found[2] or found[5] or found[4] or "").strip(", \t"))
            for found in _PAIR.finditer(bare_line)
        )
        if (
            _PEM.search(line)
            or _LOGIN.search(bare_line)
            or any(value not in _NO_SECRETS and is_secret(key, value, is_typed=True) for key, value in pairs)
        ):
            return line
    return None


def _override(text: str) -> str:
    """Hide the secrets in a text, such as an override: a value, or a password or a signature in an address."""
    name, given, value = text.partition("=")
    is_typed = bool(given and re.fullmatch(r"[+~]*[\w./@]+", name))
    if _PEM.search(text):
        return f"{name}={HIDDEN}" if is_typed else HIDDEN
    if is_typed and named_secret(name.partition("@")[0]):
        return _shown(f"{name}=", name.partition("@")[0], value)
    text = _LOGIN.sub(lambda found: f"{found[1] or found[2]}{HIDDEN}@", text)
    text = re.sub(r"([?&])([\w.-]+)=([^&\s'\",\]}]+)", lambda part: part[1] + _named(part[2], part[3]), text)
    text = _WORD.sub(_word, text)
    text = _FIELD.sub(lambda part: _named(part[1], part[2]), text)
    return _ENTRY.sub(_entry, text)


def _word(found: re.Match[str]) -> str:
    name, value = found.groups()
    if re.fullmatch(_WHOLE, value) and not named_secret(name):  # it may hold words
        return f"{name}={value[0]}{_WORD.sub(_word, value[1:])}"
    return _named(name, value)


def _entry(found: re.Match[str]) -> str:
    before = f"{found[1]}{found[2]}{found[3]}"
    return _shown(before, found[2], found[4]) if named_secret(found[2]) else before + _ENTRY.sub(_entry, found[4])


def _named(name: str, value: str) -> str:
    return _shown(f"{name}=", name, value)


def _shown(before: str, name: str, value: str) -> str:
    return before + (HIDDEN if is_secret(name, value, is_typed=True) else value)
