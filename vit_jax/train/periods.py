"""Periods in steps: how often a run logs, saves and evaluates.

In a config a period is a number of steps, or a float: a fraction of the run.
"""

# Keys of the sections log and checkpoint, and of each evaluation.
KEYS = ('every', 'keep_every')


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
