"""Pictures of maps: what was planted can be seen."""

import numpy as np
import pytest

from vit_jax.explain import plots


def picture(values, overlay):
  """Returns the map as drawn over a grey image, [h, w, 3]: a pixel per patch."""
  h, w = values.shape
  image = np.full((1, 8 * h, 8 * w, 3), 0.5)
  figure = plots.maps(image, values[None], 'Map', overlay=overlay)
  return np.asarray(figure.axes[1].images[0].get_array())[4::8, 4::8]


@pytest.mark.parametrize('overlay', ['heat', 'mask'])
@pytest.mark.parametrize('case', ['outlier', 'few'])
def test_an_object_stands_out(overlay, case):
  values, thing = np.ones((16, 16)), np.zeros((16, 16), bool)
  if case == 'outlier':  # one patch outside has a hundred times the object's weight
    thing[4:9, 5:11] = True
    values[thing], values[13, 13] = 4, 400
  else:  # fewer patches than the clip leaves out, and nothing elsewhere
    thing[7, 7:9] = True
    values[:], values[thing] = 0, 1
  brightness = picture(values, overlay).mean(-1)
  elsewhere = ~thing
  elsewhere[12:15, 12:15] = False
  assert brightness[thing].min() > brightness[elsewhere].max() + 0.15


def test_signs_have_colours_and_a_flat_map_is_flat():
  values = np.zeros((16, 16))
  values[2:6], values[10:14], values[0, 0] = 1, -1, 500
  red, _, blue = np.moveaxis(picture(values, 'signed'), -1, 0)
  assert (red - blue)[2:6].min() > 0.3
  assert (red - blue)[10:14].max() < -0.3
  for overlay in ('heat', 'mask', 'signed'):
    assert np.ptp(picture(np.full((4, 4), 0.1), overlay), (0, 1)).max() < 1e-6
