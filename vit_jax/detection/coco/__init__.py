"""The COCO format of objects in images, and its metric, by pycocotools."""
