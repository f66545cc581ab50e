"""The messages of `ext_proc.proto`, from its compiled form."""

from importlib.resources import files

from google.protobuf import descriptor_pool, struct_pb2, wrappers_pb2  # noqa: F401 -- its imports
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.internal import builder

(_described,) = FileDescriptorSet.FromString(files("gateway.rooms.picker").joinpath("ext_proc.binpb").read_bytes()).file
DESCRIPTOR = descriptor_pool.Default().AddSerializedFile(_described.SerializeToString())
builder.BuildMessageAndEnumDescriptors(DESCRIPTOR, globals())
builder.BuildTopDescriptorsAndMessages(DESCRIPTOR, __name__, globals())
