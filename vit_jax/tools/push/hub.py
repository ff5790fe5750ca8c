"""Uploading a folder to the Hugging Face Hub."""

from pathlib import Path

from vit_jax.errors import UserError, one_line

CARD = 'README.md'


def client():
  """Returns huggingface_hub's client; UserError where the package is missing."""
  try:
    import huggingface_hub
  except ImportError:
    raise UserError(
      "push needs the package huggingface_hub: pip install 'vit_jax[hub]'; --dry_run "
      'writes the folder without it.'
    ) from None
  return huggingface_hub.HfApi()


def upload(
  api, repo: str, folder: Path, *, private: bool, replace_card: bool, message: str
) -> tuple[str, bool]:
  """Returns (address of the model, whether its card was written).

  The repository is made if it does not exist. A card that is there already is kept, since
  somebody may have edited it, unless `replace_card`.

  Args:
    api: what `client` returned.
    repo: OWNER/NAME.
    private: whether a new repository is.
    message: of the commit.

  Raises:
    UserError: if the hub refuses or cannot be reached.
  """
  try:
    api.create_repo(repo, private=private, exist_ok=True)
    keep = not replace_card and api.file_exists(repo, CARD)
    api.upload_folder(
      repo_id=repo,
      folder_path=folder,
      commit_message=message,
      ignore_patterns=[CARD] if keep else None,
    )
  except Exception as error:  # the hub's own errors, and those of its HTTP library
    why = one_line(f'{type(error).__name__}: {error}')
    raise UserError(
      f'Could not push to {repo}: {why}. Log in with `hf auth login` or set HF_TOKEN to a '
      'token that may write there; --dry_run writes the folder only.'
    ) from None
  return f'https://huggingface.co/{repo}', not keep
