#include "elementwise_kernels.h"

TB_ROW_FUNCTIONS(tb_rows_avx512bf16)
