// Everything that is compiled once per instruction set. Included inside that target's pragma and namespace, after the vector types and
// all other headers; holds no lambdas and no templates of other namespaces, which would not inherit the pragma.

#include "convert-inl.h"

#include "state8-inl.h"

#include "cast-inl.h"

#include "reduce-inl.h"

#include "quantize-inl.h"

#include "dequantize-inl.h"

#include "rules-inl.h"

#include "state-inl.h"

#include "update-inl.h"

#include "step-inl.h"

static const Kernels kTable = {ZOK_TARGET_NAME, step, apply, sum_squares, count_nonfinite, cast, scale, sum_slices,
                               quantize, dequantize};
