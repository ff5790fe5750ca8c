"""`vit_jax predict` of a segmenter: the classes of pixels, as shares or masks."""

from pathlib import Path

import numpy as np

from vit_jax import cli, terminal
from vit_jax.errors import UserError
from vit_jax.tools import out_folder, predict

_BATCH = 8


def run(args, loaded, paths: list[str]) -> int:
  """Prints the share of each class among an image's pixels; writes masks into `--draw`.

  Masks have the size of their images and are as `masks:` reads them, in colours.
  """
  from PIL import Image

  from vit_jax import inference
  from vit_jax.data.ops import registry
  from vit_jax.data.single_image import SingleImage
  from vit_jax.detection import drawing
  from vit_jax.detection.tools import predict_boxes

  why = f'has no use: {args.source} gives a class for every pixel'
  cli.refuse(args, ('top', 'threshold', 'labels'), why)
  K, names = loaded.model.num_classes, loaded.class_names
  if K is None or K > 256:
    raise UserError(f'{args.source}: masks of 8 bits hold 256 classes, not {K}.')
  out, pp = predict_boxes.folder_of(args, paths), args.pp or loaded.pp
  registry.check_positions(pp)
  if out:
    out_folder.make(out, '--draw')

  def function(variables, batch):
    logits, _ = loaded.model.apply(variables, batch['image'], features=False)
    return {'mask': logits.argmax(-1).astype('uint8'), 'size': batch['size']}

  images = []
  shown = terminal.progress(paths, len(paths), 'predict', 'images')
  options = SingleImage(pp), args.batch or _BATCH, function
  for part, errors in inference.stream(loaded, shown, *options):
    sizes = part['size'].tolist()
    for error, mask, size in zip(errors, part['mask'], sizes, strict=True):
      path = paths[len(images)]
      image = (
        {'path': path, 'error': error} if error else _image(path, mask, size, names)
      )
      if out and not error:
        image['mask'] = f'{out}/{len(images):03d}_{Path(path).stem}.png'
        mask = Image.fromarray(mask).resize(size[::-1], Image.Resampling.NEAREST)
        mask.putpalette(drawing.palette(K).tobytes())
        mask.save(image['mask'])
      images.append(image)
  return predict.finish(args, loaded, images, _lines)


def _image(path: str, mask: np.ndarray, size: list[int], names) -> dict:
  share = np.bincount(mask.reshape(-1)) / mask.size
  segments = [
    {'class': k, 'name': names[k] if names else str(k), 'share': float(share[k])}
    for k in np.argsort(-share, kind='stable').tolist()
    if share[k]
  ]
  return {'path': path, 'width': size[1], 'height': size[0], 'segments': segments}


def _lines(image: dict) -> list[str]:
  rows = [f'{100 * x["share"]:5.1f} %  {x["name"]}' for x in image['segments']]
  rows += [f'mask: {image["mask"]}'] if 'mask' in image else []
  return [image['path'], *rows]
