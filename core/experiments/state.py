"""What must outlive the server: how an experiment stands, and the secret behind the units of its rows.

STATE_DIR/experiments/secret             32 bytes, made once, readable by its owner only
STATE_DIR/experiments/NAME/state.json    `State`, replaced as a whole
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import secrets
from pathlib import Path
from typing import Literal

import msgspec

from ..errors import ConfigError
from .config import ExperimentConfig
from .plan import Plan
from .records import experiment_dir
from .writer import replace_file

SECRET_BYTES = 32


class State(msgspec.Struct, kw_only=True):
    status: Literal["running", "stopped"] = "stopped"
    run: int = 0
    """Number of starts so far."""
    started: float = 0.0
    """Unix seconds; slices are counted from here."""
    stopped: float = 0.0
    traffic: float = 0.0
    plan: Plan | None = None
    """Of the run; None before the first."""
    off: dict[str, str] = {}
    """Arms that were switched off in this run, and why."""
    reason: str = ""
    """Why it was stopped."""
    settings: str = ""
    """Hash of what the arms depend on; a run does not go on with other settings."""


def settings_hash(config: ExperimentConfig) -> str:
    """Of everything but the guard rails and limits: those may change while it runs."""
    arms = {name: [arm.weight, sorted(arm.features.items()), sorted(arm.settings.items())] for name, arm in config.arms.items()}
    parts = [arms, config.control_arm, config.split, config.salt, config.slice_seconds, config.washout_seconds]
    if config.own_engines:
        parts.append(config.engines)
    return hashlib.blake2b(msgspec.json.encode(parts), digest_size=8).hexdigest()


def load_state(state_dir: Path, name: str) -> State:
    """As it was saved; a new one where there is none. ConfigError when the file can't be used."""
    path = experiment_dir(state_dir, name) / "state.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=State)
    except FileNotFoundError:
        return State()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the state of experiment {name!r} can't be read: {path}: {error}; repair or delete it") from None


def save_state(state_dir: Path, name: str, state: State) -> None:
    """Raises OSError."""
    folder = experiment_dir(state_dir, name)
    folder.mkdir(parents=True, exist_ok=True)
    replace_file(folder / "state.json", msgspec.json.encode(state))


def load_secret(state_dir: Path) -> bytes:
    """ConfigError when it can neither be read nor made."""
    path = state_dir / "experiments" / "secret"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            made = path.with_suffix(f".{os.getpid()}")
            with os.fdopen(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(secrets.token_bytes(SECRET_BYTES))
            made.replace(path)
        secret = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"server.state_dir: {path}: {error.strerror or error}") from None
    if len(secret) != SECRET_BYTES:
        raise ConfigError(
            f"{path} must hold {SECRET_BYTES} bytes; delete it to have a new one made (units in rows will then differ)"
        )
    return secret


def lock_state_dir(state_dir: Path) -> int:
    """A file that this process alone holds; ConfigError when another server does."""
    path = state_dir / "experiments" / "lock"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise ConfigError(f"server.state_dir: {path}: {error.strerror or error}") from None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(file)
        raise ConfigError(f"server.state_dir: another server uses {state_dir}: give each its own") from None
    return file
