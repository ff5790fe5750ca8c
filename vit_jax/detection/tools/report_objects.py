"""Parts of a run's page: predicted boxes and masks next to the truth."""

import numpy as np

from vit_jax.data import single_image
from vit_jax.detection import drawing
from vit_jax.detection.evaluators import coco
from vit_jax.tools.report import pictures
from vit_jax.tools.report.folder import Run

_SIDE = 360  # pixels of the longer side of a picture


def boxes(run: Run, name: str) -> dict:
  """Returns pictures, precision-recall curve and AP by class of an evaluation `coco`."""
  answers = run.predictions[name]
  names, of_class = answers['names'].tolist(), answers['of_class'].tolist()
  examples, why = pictures.read(run, name, answers['index'])

  def draw_boxes(place: int, rows) -> str:
    rows = rows[rows[:, 0] == place]
    image = single_image.pixels(examples[answers['index'][place]][1])
    corners = np.concatenate([rows[:, -4:-2], rows[:, -4:-2] + rows[:, -2:]], 1)
    classes = rows[:, 1].astype(int).tolist()
    scores = [''.join(f' {x:.0%}' for x in row[2:-4]) for row in rows]
    labels = [names[k] + score for k, score in zip(classes, scores, strict=True)]
    return pictures.url(drawing.draw(image, corners, labels, classes, 1 / 16), _SIDE)

  percent = lambda x: f'{x:.1%}' if x >= 0 else '–'
  x = np.linspace(0, 1, 101).round(2).tolist()
  curves = [
    {'run': 0, 'name': f'IoU {iou}', 'x': x, 'y': y}
    for iou, y in zip((0.5, 0.75), answers['precision'].tolist(), strict=True)
  ]
  chart = {'title': 'Precision by recall', 'x': 'recall', 'percent': True}
  return {
    'why': why,
    'pictures': [
      (
        examples[i][0],
        draw_boxes(place, answers['truth']),
        draw_boxes(place, answers['boxes']),
      )
      for place, i in enumerate(answers['index'].tolist())
      if i in examples
    ],
    'note': f'Drawn are boxes that score {coco.LEAST:.0%} or more, or else the '
    f'best {coco.BEST} of an image.',
    'head': ['class', 'objects', 'AP', 'AP50', 'AP75'],
    'rows': [
      (k, f'{n:,}', *map(percent, aps))
      for k, n, aps in zip(names, answers['objects'].tolist(), of_class, strict=True)
    ],
    'charts': [{**chart, 'curves': curves}],
  }


def masks(run: Run, name: str) -> dict:
  """Returns the pictures, and the IoU by class, of an evaluation `segmentation`."""
  answers, counts = run.predictions[name], run.predictions[name]['counts']
  usual = counts.sum(1).argmax()
  # The last colour is black, for pixels without a label.
  palette = np.pad(drawing.palette(len(counts)), ((0, 1), (0, 0)))
  examples, why = pictures.read(run, name, answers['index'])

  def paint(i: int, classes) -> str:
    classes = np.where(classes < len(counts), classes, -1)
    part = np.where(classes == usual, 0, 0.6)[..., None]
    image = (1 - part) * examples[i][2] + part * palette[classes]
    return pictures.url(np.uint8(image), _SIDE)

  rows = zip(
    answers['index'].tolist(), answers['truth'], answers['answer'], strict=True
  )
  either = counts.sum(0) + counts.sum(1) - np.diag(counts)
  some = [k for k in range(len(counts)) if either[k]]
  share, iou = counts.sum(1) / counts.sum(), np.diag(counts) / np.maximum(either, 1)
  return {
    'why': why,
    'pictures': [
      (examples[i][0], paint(i, truth), paint(i, answer))
      for i, truth, answer in rows
      if i in examples
    ],
    'note': f'Colours as in the table; {run.class_of(usual)}, the most frequent, has none.',
    'head': ['class', 'share of pixels', 'IoU'],
    'rows': [(run.class_of(k), f'{share[k]:.2%}', f'{iou[k]:.1%}') for k in some],
    'charts': [],
    'colours': ['' if k == usual else f'#{bytes(palette[k]).hex()}' for k in some],
  }
