// Adam with compact masters.

#include "compact.cuh"
#include "adam.cu"
