"""Learning from a teacher, a frozen model that sees the same images as the student.

`Distill` is the function matching of "Knowledge distillation: A good teacher is patient and
consistent" (arXiv 2106.05237): the teacher sees the student's crop, mixed as the student's, and
labels are not used. With a share of the loss left to labels, and a student with a second
token, it is the distillation of DeiT (arXiv 2012.12877). `DistillFeatures` compares features
instead of classes, for models without a head.

The teacher's parameters are frozen parameters of the run, under `TEACHER`: arguments of the
compiled step, sharded as those of the student. A checkpoint holds only their fingerprints.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import optax

from vit_jax import losses, models, trees
from vit_jax.check import Fraction, Positive
from vit_jax.tasks.classify import Classify, apply_student

# Prefix of the teacher's variables among the parameters of a run.
TEACHER = 'distill/teacher'


# -- distances: logits [B, K] of student and teacher -> [B] ---------------------------


def kl(student, teacher, temperature: float):
  """t^2 KL(teacher || student) of the softmax of logits / t, as in big_vision."""
  t = temperature
  p = jax.nn.softmax(teacher / t)
  log_p = jnp.log(jnp.clip(p, 1e-8))
  return t**2 * (p * (log_p - jax.nn.log_softmax(student / t))).sum(-1)


def soft(student, teacher, temperature: float):
  """DeiT's soft distillation, `kl` divided by K: its code takes the mean over classes."""
  return kl(student, teacher, temperature) / student.shape[-1]


def hard(student, teacher, temperature: float):
  """Cross entropy with the class that the teacher predicts, for any temperature."""
  targets = jax.nn.one_hot(teacher.argmax(-1), teacher.shape[-1])
  return losses.softmax_cross_entropy(student, targets)


DISTANCES = {'kl': kl, 'soft': soft, 'hard': hard}


# -- the teacher ----------------------------------------------------------------------


class Teacher:
  """The teacher's model, and how its images follow from those of the student."""

  def __init__(self, section: str | dict, student):
    """Builds the model, which computes in the dtype of the student.

    Args:
      section: made by `train.teacher.complete`, with the keys
        'model': the arguments of `models.build`;
        'image_size': (H, W) of the teacher's images;
        'scale', 'shift': a factor and an addend of each channel, which turn the student's
        pixels into those of the teacher.
    """
    if isinstance(section, str):
      raise ValueError(
        f'teacher={section!r}: its model is not known before a run starts'
      )
    dtype = student.fields().get('dtype', jnp.float32)
    self.model = models.build(**section['model']).change(dtype=dtype)
    self.image_size = tuple(section['image_size'])
    self.scale, self.shift = (jnp.array(section[key]) for key in ('scale', 'shift'))

  def init(self) -> dict:
    """Returns zeros in the shapes of the teacher's variables; a run replaces all of them."""
    shapes = self.model.shapes((*self.image_size, len(self.scale)))
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return trees.unflatten(trees.flatten_variables(zeros))

  def __call__(self, params: dict, images):
    """Returns (outputs, features) for the student's images [B, H, W, C], in evaluation.

    Args:
      params: the parameters of the run.
    """
    variables = trees.unflatten_variables(trees.flatten(params['distill']['teacher']))
    x = images * self.scale + self.shift
    if x.shape[1:3] != self.image_size:
      x = jax.image.resize(x, (len(x), *self.image_size, x.shape[-1]), 'cubic')
    return self.model.apply(variables, x, features=False)


# -- the tasks ------------------------------------------------------------------------


class Distill(Classify):
  """Predicts the classes that a teacher predicts, and maybe those of labels too."""

  OWN = 'distill'

  def __init__(
    self,
    model,
    spec: dict,
    *,
    teacher: str | dict,
    distance: Literal[tuple(DISTANCES)] = 'kl',
    temperature: Positive = 1.0,
    weight: Fraction = 1.0,
    **options,
  ):
    """Builds the task.

    Args:
      teacher: the source of a classifier of the same classes, see `Teacher`.
      distance: from the teacher's logits, a key of `DISTANCES`.
      temperature: divides the logits of 'kl' and 'soft'.
      weight: the share w of the teacher in the loss, (1 - w) labels + w teacher. If the
        student has a distillation token, labels train the head of its class token, and the
        teacher the other head.
      **options: those of `Classify`.

    Raises:
      ValueError: for options that have no effect together.
    """
    self.labelled = 'label' in spec
    if not self.labelled:
      if weight < 1:
        raise ValueError(
          f'weight={weight} needs labels, and the data has none: set weight=1'
        )
      spec = {**spec, 'label': jax.ShapeDtypeStruct(spec['image'].shape[:1], 'int32')}
    super().__init__(model, spec, **options)
    if temperature != 1 and distance == 'hard':
      raise ValueError(f"temperature={temperature} has no effect on distance='hard'")
    for key in ('label_smoothing', 'class_weights'):
      if weight == 1 and options.get(key):
        raise ValueError(
          f'{key}={options[key]} has no effect, because weight=1 leaves out labels'
        )
    if spec['label'].ndim == 2:
      raise ValueError('distill is for one label per image')
    self.two_heads = model.fields().get('classifier') == 'distilled'
    if self.two_heads and not 0 < weight < 1:
      raise ValueError(
        f"weight={weight} trains one of the two heads of classifier='distilled': set "
        'weight=0.5'
      )
    self.teacher = Teacher(teacher, model)
    self.distance = DISTANCES[distance]
    self.temperature, self.weight = temperature, weight

  def init(self, rng, spec: dict) -> dict:
    variables = super().init(rng, spec)
    own = {'distill': {'teacher': self.teacher.init()}}
    return {**variables, 'params': {**variables['params'], **own}}

  def prepare(self, batch: dict, rng, state) -> dict:
    """As in `Classify`. Of images without labels the targets are not read."""
    if not self.labelled:
      batch = {**batch, 'label': jnp.zeros(len(batch['image']), jnp.int32)}
    return super().prepare(batch, rng, state)

  def loss(self, variables, batch: dict, rng):
    """As in `Classify`; `agreement` is the share of the teacher's classes."""
    (logits, out), stats = apply_student(self.model, variables, batch['image'], rng)
    theirs, _ = self.teacher(variables['params'], batch['image'])
    of_labels, ours = logits, logits
    if self.two_heads:
      of_labels, ours = out['class_logits'], out['distilled_logits']
    each = self.weight * self.distance(ours, theirs, self.temperature)
    if self.weight < 1:
      each += (1 - self.weight) * self.example_losses(of_labels, batch)
    best = logits.argmax(-1)
    measured = {'loss': each, 'agreement': best == theirs.argmax(-1)}
    if self.labelled:
      measured['accuracy'] = losses.is_label(best, batch['label'])
    sums = {key: jnp.sum(batch['weight'] * x) for key, x in measured.items()}
    return sums['loss'], (sums, stats)


class DistillFeatures:
  """Predicts the features of a teacher: `pre_logits`, the vector before its head, if any.

  The student has no head. A linear layer, `distill/project`, maps its vector to the width of
  the teacher's. The loss is 1 - the cosine of the two vectors.
  """

  CLASSES = None
  OUTPUTS = 'classes'
  OWN = 'distill'

  def __init__(self, model, spec: dict, *, teacher: str | dict):
    """Builds the task.

    Args:
      teacher: the source of a model with or without a head, see `Teacher`.
    """
    if model.untuned is not model:
      raise ValueError('distill_features needs config.tune.method=full or rules')
    self.model, self.teacher = model, Teacher(teacher, model)

  def init(self, rng, spec: dict) -> dict:
    image = jnp.zeros((1, *spec['image'].shape[1:]), jnp.float32)
    (_, ours), variables = self.model.init_with_output(rng, image)
    own = {'distill': {'teacher': self.teacher.init()}}
    _, theirs = self.teacher(own, image)
    shape = ours['pre_logits'].shape[-1], theirs['pre_logits'].shape[-1]
    kernel = jax.nn.initializers.lecun_normal()(jax.random.fold_in(rng, 0), shape)
    own['distill']['project'] = {'kernel': kernel, 'bias': jnp.zeros(shape[1])}
    return {**variables, 'params': {**variables['params'], **own}}

  def prepare(self, batch: dict, rng, state) -> dict:
    return batch

  def loss(self, variables, batch: dict, rng):
    """Returns (loss, (metrics, batch statistics))."""
    params = variables['params']
    (_, ours), stats = apply_student(self.model, variables, batch['image'], rng)
    _, theirs = self.teacher(params, batch['image'])
    layer = params['distill']['project']
    ours = ours['pre_logits'] @ layer['kernel'] + layer['bias']
    each = optax.cosine_distance(ours, theirs['pre_logits'], epsilon=1e-8)
    loss = jnp.sum(batch['weight'] * each)
    return loss, ({'loss': loss}, stats)

  def predict(self, variables, batch: dict) -> dict:
    """Returns the student's named features, in evaluation."""
    return self.model.apply(variables, batch['image'], train=False)[1]
