"""COCO's average precision of detections: the twelve numbers of pycocotools.

  vit_jax coco_ap --gt instances_val2017.json --dt detections.json [--type bbox|segm]

The ground truth has images, categories and annotations; the detections are a list of
{"image_id", "category_id", "score", "bbox": [left, top, width, height]}, or instead of
"bbox" "segmentation": polygons or run lengths, compressed or not. Images without
detections count. A number is -1 where the ground truth has no object that counts.
"""

import sys

from vit_jax import cli

# Names of the numbers as COCO prints them: IoU, area, detections per image and category.
_TITLES = {
  'ap': 'AP  IoU 0.50:0.95, 100 detections',
  'ap50': 'AP  IoU 0.50',
  'ap75': 'AP  IoU 0.75',
  'ap_small': 'AP  below 32 x 32 pixels',
  'ap_medium': 'AP  32 x 32 to 96 x 96 pixels',
  'ap_large': 'AP  above 96 x 96 pixels',
  'ar_1': 'AR  1 detection',
  'ar_10': 'AR  10 detections',
  'ar_100': 'AR  100 detections',
  'ar_small': 'AR  below 32 x 32 pixels',
  'ar_medium': 'AR  32 x 32 to 96 x 96 pixels',
  'ar_large': 'AR  above 96 x 96 pixels',
}
OF_CLASS = ('ap', 'ap50', 'ap75')  # the numbers that are shown for each class


def main(argv: list[str]) -> int:
  """Prints the twelve numbers."""
  args = _parser().parse_args(argv)
  from vit_jax.detection.coco import average_precision, files

  masks = args.type == 'segm'
  truth = files.truth(args.gt, masks)
  detections = files.detections(args.dt, truth, masks)
  measured = average_precision.measure(truth, detections, args.type)
  numbers = measured.numbers()
  names = truth.class_names
  if len({*names}) < len(names):
    names = [f'{a} (id {b})' for a, b in zip(names, truth.category_ids, strict=True)]
  per_class = {}
  if args.per_class:
    per_class = {name: measured.of_category(k) for k, name in enumerate(names)}
  counts = {
    'images': len(truth.image_ids),
    'objects': len(truth.image),
    'detections': len(detections.image),
  }
  if args.json:
    record = {'type': args.type, 'stats': list(numbers.values()), **numbers, **counts}
    cli.print_json(record | ({'per_class': per_class} if args.per_class else {}))
    return 0
  print(', '.join(f'{n:,} {noun}' for noun, n in counts.items()))
  print('\n'.join(lines(numbers)))
  if args.per_class:
    width = max([5, *map(len, names)])
    print(f'  {"class":{width}}      AP    AP50    AP75')
    for name, of_class in per_class.items():
      print(f'  {name:{width}}', *(f'{of_class[k]:7.4f}' for k in OF_CLASS))
  return 0


def lines(numbers: dict[str, float]) -> list[str]:
  """Returns the twelve numbers as COCO prints them, one per line."""
  return [f'  {text:34} {numbers[name]:7.4f}' for name, text in _TITLES.items()]


def _parser() -> cli.Parser:
  parser = cli.Parser('vit_jax coco_ap', description=__doc__.split('\n')[0])
  parser.add_argument('--gt', required=True, metavar='FILE', help='ground truth')
  parser.add_argument('--dt', required=True, metavar='FILE', help='detections')
  parser.add_argument(
    '--type', choices=('bbox', 'segm'), default='bbox', help='compare boxes, or masks'
  )
  parser.add_argument(
    '--per_class', action='store_true', help='also print the numbers for each category'
  )
  cli.add_json_option(parser)
  return parser


if __name__ == '__main__':
  sys.exit(cli.run(main))
