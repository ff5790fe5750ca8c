"""Finds the images whose features are most similar to those of other images.

  vit_jax search features.parquet QUERY.jpg... [--top 10] [--page page.html]
  vit_jax search features.parquet --text 'a red car'     features of CLIP or SigLIP
  vit_jax search features.parquet --near_duplicates 0.95

`vit_jax embed` wrote the file. Queries are embedded with the weights and the preprocessing
that the file names. Similarity is the cosine. The search is exact and runs on the device in
chunks. Near duplicates are groups of images in which each image has a similarity of at least
the threshold to another one of the group. `--page` shows pictures in one HTML file.
"""

import contextlib
import sys
from pathlib import Path

import numpy as np

from vit_jax import cli, files, terminal
from vit_jax.data.single_image import SingleImage
from vit_jax.errors import BadImage, UserError, choose, printable
from vit_jax.tools import embed, feature_file, out_folder, predict, zero_shot

_TOP, _BATCH = 10, 8
# Number of features on the device at a time.
_ROWS = 1 << 16
# Maximum number of pictures in a group, and of groups on a page. A picture takes 10 kB.
_PICTURES, _GROUPS = 24, 200


def main(argv: list[str]) -> int:
  """Prints the most similar images of every query, or the groups of near duplicates."""
  args = _parser().parse_args(argv)
  threshold = args.near_duplicates
  if bool(args.queries) + bool(args.text) + (threshold is not None) != 1:
    raise UserError('search takes one of: images, --text, --near_duplicates COSINE.')
  if threshold is not None and not 0 < threshold <= 1:
    raise UserError(f'--near_duplicates {threshold}: expected a cosine in (0, 1].')
  page = args.page and files.local_path(args.page, '--page')
  if page:
    if not page.name or page.is_dir():
      raise UserError(f'--page {page} is a folder: name a file in it.')
    out_folder.check_folder(str(page.parent), '--page')
  file = feature_file.File(args.features)
  layers = file.record['recipe']['layers']
  layer = args.layer or next(iter(layers))
  if len(choose('layer', layer, layers)) > 1:
    raise UserError(
      f'{args.features} has a row per patch, but search compares images: write a file of '
      'pre_logits with vit_jax embed.'
    )
  folder = Path(args.folder or file.record['folder'])
  paths = [str(folder / name) for name in file.paths()]
  if threshold is None:
    groups = _queries(args, file, layer, paths)
  else:
    groups = _duplicates(file.chunks(layer, _ROWS), threshold, paths)
  if page:
    out_folder.make(page.parent, '--page')
    files.replace(page, _page(args.features, groups, f'{folder}/'))
  if args.json:
    kind = 'queries' if threshold is None else 'near_duplicates'
    record = {'features': args.features, 'layer': layer, 'not_finite': file.not_finite}
    cli.print_json(record | {kind: groups})
  else:
    print('\n'.join(map(_render, groups)) or 'No near duplicates.')
    if page:
      print(page.absolute().as_uri())
  if groups and all('error' in group for group in groups):
    why = groups[0]['error']
    raise UserError(f'None of {len(groups)} queries has features: {why}.')
  if file.not_finite:
    terminal.say(
      f'{args.features}: {file.not_finite:,} of {len(paths):,} images have features that '
      'are not finite, and are left out.'
    )
  return 0


def _queries(args, file, layer: str, paths: list[str]) -> list[dict]:
  """Returns for each query a dict of 'query', the nearest 'images', and maybe an 'error'."""
  queries = args.text or predict.find_images(args.queries)
  from vit_jax import inference, sharding, weights

  recipe, name = file.record['recipe'], args.source or file.record['source']
  options = file.record['options'] | {'dtype': recipe['dtype']}
  try:
    loaded = weights.load(name, image_size=tuple(recipe['image_size']), **options)
  except UserError as error:
    raise UserError(
      f'{error} Pass the weights of {args.features} with --source.'
    ) from None
  if embed.fingerprint(loaded) != recipe['fingerprint']:
    raise UserError(f'{args.features} was written with other weights than {loaded}.')
  errors = [None] * len(queries)
  if not args.text:
    function, _ = embed.extractor(loaded, [layer])
    preprocess = SingleImage(recipe['pp'])
    rows, errors = inference.run(loaded, queries, preprocess, _BATCH, function)
    vectors = rows[layer]
  elif zero_shot.is_pair(loaded) and layer == 'logits':
    vectors = loaded.text(args.text)
  else:
    raise UserError(f'--text: {args.features} has no `logits` of CLIP or SigLIP.')
  finite = np.isfinite(vectors).all(1)
  errors = [
    why or (None if good else 'its features are not finite')
    for why, good in zip(errors, finite, strict=True)
  ]
  chunks, mesh = file.chunks(layer, _ROWS), sharding.make_mesh()
  best = zip(*nearest(chunks, vectors, args.top, mesh), strict=True)
  groups = zip(queries, errors, best, strict=True)
  return [
    {'query': query, **({'error': why, 'images': []} if why else _images(paths, *row))}
    for query, why, row in groups
  ]


def _images(paths: list[str], similarities, rows) -> dict:
  both = zip(rows, similarities, strict=True)
  return {'images': [{'path': paths[i], 'similarity': float(s)} for i, s in both]}


def nearest(chunks, queries: np.ndarray, k: int, mesh) -> tuple[np.ndarray, np.ndarray]:
  """Finds the k nearest rows; returns their similarities and numbers, both [n, k].

  Args:
    chunks: the rows in chunks, together [N, D] float32. Rows of NaN are left out. If fewer
      than k remain, all of them are returned.
    queries: [n, D] float32.
  """
  from vit_jax.evaluators import knn

  best = np.zeros((len(queries), 0), np.float32), np.zeros((len(queries), 0), int)
  first = 0
  for keys in chunks:
    numbers = np.flatnonzero(~np.isnan(keys[:, 0]))
    if len(numbers):
      values, rows = knn.nearest(keys[numbers], queries, min(k, len(numbers)), mesh)
      rows = first + numbers[rows]
      both = [np.hstack(x) for x in zip(best, (values, rows), strict=True)]
      order = np.argsort(-both[0], axis=1, kind='stable')[:, :k]
      best = tuple(np.take_along_axis(x, order, 1) for x in both)
    first += len(keys)
  return best


def _duplicates(chunks, threshold: float, paths: list[str]) -> list[dict]:
  """Returns groups of similar images, the largest first, as {'images': [...]}.

  The similarities are those to the first image of a group.
  """
  x = np.concatenate([*chunks])
  x /= np.maximum(np.linalg.norm(x, axis=1, keepdims=True), 1e-30)
  labels = link_rows(x, threshold)
  order = np.argsort(labels, kind='stable')
  groups = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
  groups = sorted((rows for rows in groups if len(rows) > 1), key=len, reverse=True)
  return [_images(paths, x[rows] @ x[rows[0]], rows) for rows in groups]


def link_rows(x: np.ndarray, threshold: float, tile_size: int = 4096) -> np.ndarray:
  """Groups rows that are similar; returns the first row of each row's group, int [N].

  Two rows are linked if their product is at least `threshold`. A group is all rows that are
  connected by links. All pairs are computed, tile by tile on the device.

  Args:
    x: [N, D] float32, rows of norm 1.
    tile_size: number of rows and columns of similarities computed at a time.
  """
  import jax
  import jax.numpy as jnp

  @jax.jit
  def similar(a, b, start):
    # 1e-6 allows for rounding errors.
    pairs = jnp.dot(a, b.T, precision='highest') >= threshold - 1e-6
    # Take each pair once, with the second row after the first.
    pairs &= jnp.arange(len(b)) + start > jnp.arange(len(a))[:, None]
    return pairs.any(), pairs

  def tile(i):
    rows = x[i : i + size]
    return np.pad(rows, ((0, size - len(rows)), (0, 0)), constant_values=np.nan)

  size, labels = min(tile_size, len(x)), np.arange(len(x))
  firsts = range(0, len(x), size)
  for i in terminal.progress(firsts, len(firsts), 'search', 'rows of tiles'):
    a = jax.device_put(tile(i))
    for j in range(i, len(x), size):
      some, pairs = similar(a, tile(j), j - i)
      if some:
        # Use NumPy's `nonzero`, because JAX's would be compiled.
        rows, columns = np.nonzero(np.asarray(pairs))
        _link(labels, rows + i, columns + j)
  return labels


def _link(labels: np.ndarray, rows, columns) -> None:
  """Joins the groups of linked rows in place; a label is the first row of a group."""
  while len(rows):
    a, b = labels[rows], labels[columns]
    np.minimum.at(labels, np.maximum(a, b), np.minimum(a, b))
    while ((firsts := labels[labels]) != labels).any():
      labels[:] = firsts
    apart = labels[rows] != labels[columns]
    rows, columns = rows[apart], columns[apart]


def _render(group: dict) -> str:
  near = f'{len(group["images"])} images, and how similar each is to the first'
  head = group.get('query', near)
  rows = [f'{row["similarity"]:6.3f}  {row["path"]}' for row in group['images']]
  rows += [f'no features: {group["error"]}'] if 'error' in group else []
  return '\n  '.join(map(printable, [head, *rows]))


def _page(name: str, groups: list[dict], folder: str) -> str:
  """Returns the HTML of a page with pictures, and their paths below the folder."""
  from vit_jax.tools.report import page, pictures

  small, sections = SingleImage('decode|resize_small(160)|value_range(0, 255)'), []

  def picture(path):
    with contextlib.suppress(BadImage):
      return pictures.url(np.uint8(small(path)))

  shown = groups[:_GROUPS]
  for group in terminal.progress(shown, len(shown), 'page', 'groups'):
    images = group['images']
    rows = [(row['path'], f'{row["similarity"]:.3f}') for row in images[:_PICTURES]]
    if Path(group.get('query', '')).is_file():
      rows = [(group['query'], 'query'), *rows]
    title = group.get('query', f'{len(images)} images')
    note = group.get('error') or _rest(len(images) - _PICTURES, 'images')
    shown_rows = [(x.removeprefix(folder), text, picture(x)) for x, text in rows]
    sections.append((title.removeprefix(folder), note, shown_rows))
  note = _rest(len(groups) - _GROUPS, 'groups')
  title = f'Similar images: {Path(name).name}'
  return page.fill_template('search.html', title=title, sections=sections, note=note)


def _rest(number: int, noun: str) -> str:
  return f'and {number:,} more {noun}' if number > 0 else ''


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax search', description=__doc__.split('\n')[0])
  add = parser.add_argument
  add('features', metavar='FEATURES.parquet', help='by vit_jax embed')
  add('queries', metavar='IMAGE_OR_FOLDER', nargs='*')
  add('--text', action='append', help='query; may be repeated')
  add('--top', type=cli.positive, default=_TOP, help=f'per query; default: {_TOP}')
  duplicates = 'groups of images at least so similar: 0.95'
  add('--near_duplicates', metavar='COSINE', type=float, help=duplicates)
  add('--layer', help='default: the first of the file')
  add('--page', metavar='FILE.html', help='write a page of pictures')
  add('--folder', help='of the images, if it moved')
  add('--source', metavar='SOURCE', help='of the weights, if they moved')
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
