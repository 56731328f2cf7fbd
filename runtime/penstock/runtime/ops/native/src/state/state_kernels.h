// The kernels of state.h, compiled once per instruction set.
#pragma once

#include "state/conv_kernel.h"
#include "state/norm_kernel.h"
#include "state/recurrence_kernel.h"
