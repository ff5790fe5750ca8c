"""`vit_jax predict` of a segmenter: the classes of pixels, as shares or masks."""

from pathlib import Path

import numpy as np

from vit_jax import cli, terminal
from vit_jax.errors import UserError, printable
from vit_jax.tools import out_folder

_BATCH = 8


def run(args, loaded, paths: list[str]) -> int:
  """Prints the share of each class among an image's pixels; writes masks into `--draw`.

  Masks have the size of their images and are as `masks:` reads them, in colours.
  """
  import jax
  from PIL import Image

  from vit_jax import inference
  from vit_jax.data.ops import registry
  from vit_jax.data.single_image import SingleImage
  from vit_jax.detection import drawing
  from vit_jax.detection.tools import predict_boxes

  for name in ('top', 'threshold', 'labels'):
    if getattr(args, name) is not None:
      raise UserError(f'--{name}: {args.source} gives a class for every pixel.')
  K, names = loaded.model.num_classes, loaded.class_names
  if K is None or K > 256:
    raise UserError(f'{args.source}: masks of 8 bits hold 256 classes, not {K}.')
  out, pp = predict_boxes.folder_of(args, paths), args.pp or loaded.pp
  registry.check_positions(pp)
  if out:
    out_folder.make(out, '--draw')

  @jax.jit
  def predict(variables, batch):
    logits, _ = loaded.model.apply(variables, batch['image'], features=False)
    return logits.argmax(-1).astype('uint8')

  images, variables = [], jax.device_put(loaded.variables)
  shown = terminal.progress(paths, len(paths), 'predict', 'images')
  batches = inference.batches(loaded, shown, SingleImage(pp), args.batch or _BATCH)
  for batch, errors in batches:
    masks, sizes = np.asarray(predict(variables, batch)), batch['size'].tolist()
    for error, mask, (height, width) in zip(errors, masks, sizes, strict=False):
      i = len(images)
      images.append({'path': paths[i], 'error': error})
      if error:
        continue
      share = np.bincount(mask.reshape(-1)) / mask.size
      segments = [
        {'class': k, 'name': names[k] if names else str(k), 'share': float(share[k])}
        for k in np.argsort(-share, kind='stable').tolist()
        if share[k]
      ]
      images[i] = {'path': paths[i], 'width': width, 'height': height}
      images[i]['segments'] = segments
      if out:
        name = f'{out}/{i:03d}_{Path(paths[i]).stem}.png'
        images[i]['mask'] = name
        mask = Image.fromarray(mask).resize((width, height), Image.Resampling.NEAREST)
        mask.putpalette(drawing.palette(K).tobytes())
        mask.save(name)
  if args.json:
    cli.print_json({'source': args.source, 'step': loaded.step, 'images': images})
  else:
    print('\n'.join(map(_render, images)))
  if all('error' in image for image in images):
    raise UserError(f'None of {len(paths)} images could be read.')
  return 0


def _render(image: dict) -> str:
  rows = [f'{100 * x["share"]:5.1f} %  {x["name"]}' for x in image.get('segments', ())]
  rows += [f'mask: {image["mask"]}'] if 'mask' in image else []
  rows += [f'not read: {image["error"]}'] if 'error' in image else []
  return '\n  '.join(map(printable, [image['path'], *rows]))
