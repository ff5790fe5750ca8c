"""How often a run logs, saves and evaluates: in steps, or as a fraction of the run."""

from vit_jax import config_check
from vit_jax.errors import UserError

# Keys of the sections log and checkpoint, and of each evaluation.
KEYS = ('every', 'keep_every')


def allowed(check):
  """Returns a section's check, whose periods may be fractions of the run.

  Args:
    check: of the section with its periods in steps, see `config_check`.
  """

  def check_both(where, section, config):
    config_check.check_type(where, section, dict)
    for key in KEYS:
      _check_period(f'{where}.{key}', section.get(key))
    check(where, _in_steps(section, 1), config)

  return check_both


def _check_period(where: str, period) -> None:
  config_check.check_type(where, period, int | float | None)
  if period is None or (isinstance(period, int) and period >= 1) or 0 < period <= 1:
    return
  raise UserError(
    f'{where}={period}: expected 1 or more steps, or a fraction of the run: a float '
    'above 0, up to 1.0.'
  )


def _in_steps(section: dict, total_steps: int) -> dict:
  periods = {k: v for k, v in section.items() if k in KEYS and isinstance(v, float)}
  return section | {k: max(1, round(v * total_steps)) for k, v in periods.items()}


def in_steps(config: dict, total_steps: int) -> dict:
  """Returns the config with its periods, where they are fractions of the run, in steps."""
  sections = {
    name: _in_steps(config[name], total_steps) for name in ('log', 'checkpoint')
  }
  evals = {k: _in_steps(section, total_steps) for k, section in config['evals'].items()}
  return {**config, **sections, 'evals': evals}
