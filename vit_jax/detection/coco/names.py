"""Names of COCO's classes, for published detectors whose files have none.

Ids run from 1 to 90. Ten of them have names in the paper (arXiv 1405.0312), but no objects in
the data. torchvision and DETR predict ids. detectron2 and mmdetection number the other 80.
"""

_UNUSED = (12, 26, 29, 30, 45, 66, 68, 69, 71, 83)
_TEXT = """\
person,bicycle,car,motorcycle,airplane,bus,train,truck,boat,traffic light,fire hydrant,\
street sign,stop sign,parking meter,bench,bird,cat,dog,horse,sheep,cow,elephant,bear,zebra,\
giraffe,hat,backpack,umbrella,shoe,eye glasses,handbag,tie,suitcase,frisbee,skis,snowboard,\
sports ball,kite,baseball bat,baseball glove,skateboard,surfboard,tennis racket,bottle,plate,\
wine glass,cup,fork,knife,spoon,bowl,banana,apple,sandwich,orange,broccoli,carrot,hot dog,\
pizza,donut,cake,chair,couch,potted plant,bed,mirror,dining table,window,desk,toilet,door,tv,\
laptop,mouse,remote,keyboard,cell phone,microwave,oven,toaster,sink,refrigerator,blender,book,\
clock,vase,scissors,teddy bear,hair drier,toothbrush"""
# The name of id k + 1 is at position k.
IDS = _TEXT.split(',')
# {number of classes: names}, for files that number classes in these ways.
USED = {80: [name for i, name in enumerate(IDS, 1) if i not in _UNUSED]}
FROM_1 = {90: IDS}
FROM_0 = {91: ['no object', *IDS]}
