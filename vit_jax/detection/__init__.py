"""Boxes and masks: models, tasks, data, evaluators and weights of detectors.

`ENTRIES` are this ring's lines in the tables of the core, see `vit_jax.registry`.
"""

_PREDICT = 'vit_jax.detection.tools.predict'
_EVALUATE = 'vit_jax.detection.tools.evaluate_boxes:run'

ENTRIES = {
  'model': {
    'vitdet': 'vit_jax.detection.models.vitdet:FAMILY',
    'fpn': 'vit_jax.detection.models.fpn:FAMILY',
    'sfp': 'vit_jax.detection.models.sfp:FAMILY',
    'semantic_fpn': 'vit_jax.detection.models.semantic_fpn:FAMILY',
    'linear_seg': 'vit_jax.detection.models.linear_seg:FAMILY',
    'detr': 'vit_jax.detection.models.detr:FAMILY',
    'rcnn': 'vit_jax.detection.models.rcnn:FAMILY',
  },
  'task': {
    'detect': 'vit_jax.detection.tasks.detect:Detect',
    'rcnn': 'vit_jax.detection.tasks.rcnn:RCNN',
    'segment': 'vit_jax.detection.tasks.segment:Segment',
  },
  'evaluator type': {
    'coco': 'vit_jax.detection.evaluators.coco:Coco',
    'segmentation': 'vit_jax.detection.evaluators.segmentation:Segmentation',
  },
  'source': {
    'digits_canvas': 'vit_jax.detection.data.digits_canvas:DigitsCanvas',
    'coco': 'vit_jax.detection.data.coco:Coco',
    'yolo': 'vit_jax.detection.data.paired:Yolo',
    'voc': 'vit_jax.detection.data.paired:Voc',
    'masks': 'vit_jax.detection.data.masks:Masks',
  },
  'target of a source': {
    'coco': 'ROOT or coco:ANNOTATIONS.json,IMAGE_FOLDER',
    'yolo': 'ROOT',
    'voc': 'ROOT',
    'masks': 'ROOT',
  },
  'source of TFDS': {'objects': 'vit_jax.detection.data.tfds_objects:TfdsObjects'},
  'op': {
    'detr_resize': 'vit_jax.detection.data.object_ops:detr_resize',
    'fit': 'vit_jax.detection.data.object_ops:fit',
    'detr_crop': 'vit_jax.detection.data.object_ops:detr_crop',
    'lsj': 'vit_jax.detection.data.object_ops:lsj',
    'canvas': 'vit_jax.detection.data.object_ops:canvas',
  },
  'format': {
    'rcnn': 'vit_jax.detection.weights.rcnn:FORMATS',
    'detr': 'vit_jax.detection.weights.detr:FORMATS',
    'fpn': 'vit_jax.detection.weights.fpn:FORMATS',
    'vitdet': 'vit_jax.detection.weights.vitdet:FORMATS',
  },
  'start': {
    ('vit', 'vitdet'): 'vit_jax.detection.weights.vitdet:start',
    ('vitdet', 'vitdet'): 'vit_jax.detection.weights.vitdet:start_again',
  },
  # Parts of tools, by the kind of a model's outputs or the type of an evaluation.
  'features of outputs': {
    'boxes': 'vit_jax.detection.data.objects:BOXES',
    'regions': 'vit_jax.detection.data.objects:EVERY',
  },
  'options of predict': {'detection': f'{_PREDICT}:add_options'},
  'part of predict': {
    'boxes': f'{_PREDICT}:objects',
    'regions': f'{_PREDICT}:objects',
    'pixels': f'{_PREDICT}:pixels',
  },
  'part of evaluate': {'boxes': _EVALUATE, 'regions': _EVALUATE},
  'part of a page': {
    'coco': 'vit_jax.detection.tools.report_objects:boxes',
    'segmentation': 'vit_jax.detection.tools.report_objects:masks',
  },
}
